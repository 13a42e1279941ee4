"""The command `virnuc approve`: a reviewer's answer to a validation that waits for it."""

import getpass
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field

from virnuc.flows.cli.options import Flag, command
from virnuc.flows.cli.output import say
from virnuc.flows.cli.prefect_settings import prepare_prefect
from virnuc.flows.cli.temporary_server import start_temporary_server
from virnuc_core.errors import ConfigError, VirnucError
from virnuc_core.profiles import NOT_ANSWERED, QUESTIONS, Review
from virnuc_core.runfiles import redact_credentials

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

NAME_THE_SERVER: Final = "name the server of the run with PREFECT_API_URL"
FLOW_RUN_ID: Final = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class ApprovalOptions(Review):
    """A reviewer's answer to a validation."""

    run: str = Field(description="flow run: its id or its name")
    yes: Flag = Field(False, description="approve")
    no: Flag = Field(False, description="reject")
    later: Flag = Field(False, description="leave it pending")
    reviewer: str | None = Field(None, description="who decides (default: the login name)")


@command(ApprovalOptions, "run")
def approve(options: ApprovalOptions) -> None:
    """Answer a validation that was started with --approval and waits."""
    review = _review_form(options)
    prepare_prefect()
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE

    if PREFECT_API_URL.value() is None and PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
        # No server is named, so the run may have been paused at a temporary server. A new one has
        # the same database and knows the run. Left to itself, Prefect would start a server that
        # answers every user of the machine.
        server = start_temporary_server(debug=False, alternative=NAME_THE_SERVER)
        server.wait()  # until it answers
    with _refusals_in_one_line(), get_client(sync_client=True) as client:
        flow_run = _find_flow_run(client, options.run)
        _require_waiting(flow_run)
        _require_answers(review)
        response = client.resume_flow_run(flow_run.id, run_input=review)
    if response.status.value != "ACCEPT":
        # Somebody else may have answered meanwhile.
        reason = getattr(response.details, "reason", None) or response.status.value
        raise VirnucError(f"flow run '{flow_run.name}': the answer was not accepted: {reason}")
    say(f"{flow_run.name}: {review['verdict']} by {review['reviewer']}")


@contextmanager
def _refusals_in_one_line() -> Iterator[None]:
    """Turn what a server answers to the `with` block, or that none answers, into one line.

    Raises:
        VirnucError: The server was not reached, or refused the request.
    """
    import httpx
    from prefect.exceptions import PrefectException
    from prefect.settings import PREFECT_API_URL

    from virnuc.flows.server_refusal import server_refusal

    try:
        yield
    # Prefect's client raises a RuntimeError if it cannot ask for the server's version.
    except (httpx.HTTPError, RuntimeError, ValueError, PrefectException) as error:
        shown_url = redact_credentials(str(PREFECT_API_URL.value()))
        refusal = server_refusal(error, shown_url, alternative="")
        if isinstance(error, VirnucError) or refusal is None:
            raise
        raise refusal from error


def _require_waiting(flow_run: "FlowRun") -> None:
    """Return if a flow run waits for an answer, and its process can still take it.

    Raises:
        ConfigError: It does not wait, or its process on this machine has ended.
    """
    from virnuc.tasks.running_mark import is_orphan

    if not _is_waiting(flow_run):
        message = f"flow run '{flow_run.name}' does not wait for an answer; it is "
        raise ConfigError(message + str(flow_run.state_name))
    if is_orphan(flow_run):
        raise ConfigError(
            f"flow run '{flow_run.name}' waits, but its process has ended and cannot take an "
            "answer; start the same validation again with --approval"
        )


def _review_form(options: ApprovalOptions) -> dict[str, Any]:
    """Return the reviewer's answer with the fields of the form that the paused run shows.

    Without the option `--reviewer`, the reviewer is the user of this machine.

    Raises:
        ConfigError: Not exactly one of the three verdicts was given.
    """
    verdicts = []
    if options.yes:
        verdicts.append("approved")
    if options.no:
        verdicts.append("rejected")
    if options.later:
        verdicts.append("pending")
    if len(verdicts) != 1:
        raise ConfigError("give one of --yes, --no and --later; see virnuc approve --help")
    form = {"verdict": verdicts[0], "reviewer": getpass.getuser()}
    # The other options are named like the fields of the form. None means that one was not given.
    answers = options.model_dump(exclude={"run", "yes", "no", "later"}, exclude_none=True)
    return form | answers


def _require_answers(review: dict[str, Any]) -> None:
    """Return if a reviewer who approves has answered every question.

    Raises:
        ConfigError: A question has no answer. The message names the options that are missing.
    """
    unanswered = [name for name in QUESTIONS if review.get(name, NOT_ANSWERED) == NOT_ANSWERED]
    if review["verdict"] == "approved" and unanswered:
        missing = ", ".join(f"--{name.replace('_', '-')}" for name in unanswered)
        raise ConfigError(f"--yes needs an answer (yes or no) to every question; add {missing}")


def _find_flow_run(client: "SyncPrefectClient", run: str) -> "FlowRun":
    """Return the flow run with this id or name.

    Several runs may have the same name. The one that waits for an answer is returned or, if none
    waits, any of them.

    Raises:
        ConfigError: There is no such run, or several runs with this name wait.
    """
    from prefect.client.schemas.filters import FlowRunFilter

    key = "id" if FLOW_RUN_ID.fullmatch(run) else "name"
    run_filter = FlowRunFilter.model_validate({key: {"any_": [run]}})
    flow_runs = client.read_flow_runs(flow_run_filter=run_filter)
    if not flow_runs:
        raise ConfigError(f"no flow run has the {key} '{run}'")
    waiting = [flow_run for flow_run in flow_runs if _is_waiting(flow_run)]
    if len(waiting) > 1:
        raise ConfigError(f"{len(waiting)} flow runs named '{run}' wait; name one by its id")
    if waiting:
        return waiting[0]
    return flow_runs[0]


def _is_waiting(flow_run: "FlowRun") -> bool:
    """Return whether a flow run is paused, which is how a validation waits for its reviewer."""
    return flow_run.state is not None and flow_run.state.is_paused()
