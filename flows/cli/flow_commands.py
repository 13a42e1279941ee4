"""What each flow beside `predict` takes, one flat model each, and the command that starts it; and `virnuc approve`."""

import getpass
import re
from typing import Any, Final

from pydantic import Field

from virnuc.flows.cli.options import Flag, command
from virnuc.flows.cli.start import prepare_prefect, say, starts
from virnuc.flows.cli.temporary_server import start_temporary_server
from virnuc.flows.settings.inbox import InboxSettings
from virnuc.flows.settings.overhead import OverheadSettings
from virnuc.flows.settings.profile import ProfileSettings
from virnuc.flows.settings.scale import ScaleSettings
from virnuc.flows.settings.train import TrainSettings
from virnuc.flows.settings.tune import TuneSettings
from virnuc.flows.settings.validate import ValidateSettings
from virnuc_core.errors import ConfigError, VirnucError
from virnuc_core.profiles import Review

NAME_THE_SERVER: Final = "name the server of the run with PREFECT_API_URL"

predict_inbox = starts("predict-inbox", InboxSettings)


validate = starts("validate", ValidateSettings, "reads")


scale = starts("scale", ScaleSettings, "reads")


tune = starts("tune", TuneSettings, "reads")


profile = starts("profile", ProfileSettings, "reads")


overhead = starts("overhead", OverheadSettings, "out")


train = starts("train", TrainSettings, "reads")


class ApprovalOptions(Review):
    """A reviewer's answer to a validation."""

    run: str = Field(description="flow run: its id or its name")
    yes: Flag = Field(False, description="approve")
    no: Flag = Field(False, description="reject")
    later: Flag = Field(False, description="leave it pending")
    reviewer: str | None = Field(None, description="who decides (default: the login name)")


@command(ApprovalOptions, "run")
def approve(answer: ApprovalOptions) -> None:
    """Answer a validation that was started with --approval and waits."""
    decisions = {"approved": answer.yes, "rejected": answer.no, "pending": answer.later}
    chosen = [verdict for verdict, wanted in decisions.items() if wanted]
    if len(chosen) != 1:
        raise ConfigError("give one of --yes, --no and --later; see virnuc approve --help")
    told = answer.model_dump(exclude={"run", "yes", "no", "later"}, exclude_none=True)
    form = {
        "verdict": chosen[0],
        "reviewer": getpass.getuser(),
        **told,
    }  # as the paused run takes it
    prepare_prefect()
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE

    if PREFECT_API_URL.value() is None and PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
        # The run may wait at a temporary server, whose database is ours, too. Prefect would start a
        # server that answers every user of the machine.
        start_temporary_server(debug=False, alternative=NAME_THE_SERVER).wait()
    with get_client(sync_client=True) as client:
        flow_run = _find(client, answer.run)
        if flow_run.state is None or not flow_run.state.is_paused():
            raise ConfigError(
                f"flow run '{flow_run.name}' does not wait for an answer; it is {flow_run.state_name}"
            )
        response = client.resume_flow_run(flow_run.id, run_input=form)
    if response.status.value != "ACCEPT":
        reason = getattr(response.details, "reason", None) or response.status.value
        raise VirnucError(f"flow run '{flow_run.name}': the answer was not accepted: {reason}")
    say(f"{flow_run.name}: {form['verdict']} by {form['reviewer']}")


def _find(client: Any, run: str) -> Any:
    """The flow run of that id, or the one of that name that waits."""
    from prefect.client.schemas.filters import FlowRunFilter

    key = "id" if re.fullmatch("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", run) else "name"
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate({key: {"any_": [run]}})
    )
    waiting = [
        flow_run for flow_run in found if flow_run.state is not None and flow_run.state.is_paused()
    ]
    if len(waiting) > 1:
        raise ConfigError(f"{len(waiting)} flow runs named '{run}' wait; name one by its id")
    if not found:
        raise ConfigError(f"no flow run has the {key} '{run}'")
    return (waiting or found)[0]
