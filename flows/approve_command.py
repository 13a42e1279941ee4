"""`virnuc approve`: answer a validation that waits for its reviewer."""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from flows import settings
from flows.options import command_parser
from virnuc_core.errors import ConfigError, VirnucError

QUESTIONS = (
    ("all_criteria_met", "are all criteria met?"),
    ("target_realistic", "if not: was the target realistic?"),
    ("tuning_could_help", "if not: could tuning help?"),
    ("code_fix_needed", "if not: is a code fix needed?"),
    ("esm2_still_bottleneck", "is ESM-2 still the bottleneck?"),
)


def approve(words: Sequence[str]) -> int:
    """Resume a paused flow run with the reviewer's answers."""
    parser = command_parser("approve", "Answer a validation that was started with --approval and waits.")
    parser.add_argument("run", metavar="RUN", help="flow run: its id or its name")
    decision = parser.add_mutually_exclusive_group(required=True)
    decision.add_argument("--yes", dest="verdict", action="store_const", const="approved", help="approve")
    decision.add_argument("--no", dest="verdict", action="store_const", const="rejected", help="reject")
    decision.add_argument("--later", dest="verdict", action="store_const", const="pending", help="leave it pending")
    parser.add_argument("--reviewer", default=None, help="who decides (default: the login name)")
    parser.add_argument("--note", default="", help="issues, adjustments, follow-up work")
    for name, question in QUESTIONS:
        parser.add_argument("--" + name.replace("_", "-"), choices=("yes", "no"), default="not answered", help=question)
    arguments = parser.parse_args(words)
    answer = {name: getattr(arguments, name) for name, _ in QUESTIONS}
    answer |= {
        "verdict": arguments.verdict,
        "reviewer": arguments.reviewer or getpass.getuser(),
        "note": arguments.note,
    }
    settings.prepare()
    print(_resume(arguments.run, answer))
    return 0


def _resume(run: str, answer: dict[str, Any]) -> str:
    """Send the answer; says what was done. Errors: `ConfigError` for a run that is absent or does not wait."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.responses import SetStateStatus

    with get_client(sync_client=True) as client:
        flow_run = _find(client, run)
        if flow_run.state is None or not flow_run.state.is_paused():
            name = "no state" if flow_run.state is None else flow_run.state.name
            raise ConfigError(f"flow run '{flow_run.name}' does not wait for an answer; it is {name}")
        response = client.resume_flow_run(flow_run.id, run_input=answer)
    if response.status != SetStateStatus.ACCEPT:
        reason = getattr(response.details, "reason", None) or response.status.value
        raise VirnucError(f"flow run '{flow_run.name}': the answer was not accepted: {reason}")
    return f"{flow_run.name}: {answer['verdict']} by {answer['reviewer']}"


def _find(client: Any, run: str) -> Any:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_flow_run(UUID(run))
    except ValueError:
        pass
    except ObjectNotFound:
        raise ConfigError(f"no flow run has the id {run}") from None
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[run])))
    waiting = [flow_run for flow_run in found if flow_run.state is not None and flow_run.state.is_paused()]
    if len(waiting) > 1:
        raise ConfigError(f"{len(waiting)} flow runs named '{run}' wait; name one by its id")
    if not found:
        raise ConfigError(f"no flow run is named '{run}'")
    return (waiting or found)[0]
