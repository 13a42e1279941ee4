"""Commands that start a flow which measures or trains, and the reviewer's answer to one that waits."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from cyclopts import Parameter
from pydantic import Field

from flows.flow_commands import prepare_prefect, say, start
from flows.measure_parameters import ProfileSettings, ScaleSettings, TrainSettings, TuneSettings, ValidateSettings
from flows.parameters import command
from virnuc_core.config import Spec
from virnuc_core.errors import ConfigError, VirnucError

CRITERION_FAILED: Final = 5


@command(TrainSettings, "reads")
def train(settings: TrainSettings, debug: bool) -> int:
    """Fit the head on labelled reads."""
    state = start("flows.train:train", settings, debug)
    head = f"{settings.models / 'head'} (installed)" if settings.install else settings.out / "head"
    say(state.message, f"Head: {head}")
    return 0


@command(ValidateSettings)
def validate(settings: ValidateSettings, debug: bool) -> int:
    """Prove this machine, with these weights, against a profile; exit code 5 when a criterion was missed."""
    state = start("flows.validate:validate", settings, debug)
    from tasks.step import NOT_MET, REJECTED

    folder = settings.out / "report"
    say((folder / "report.txt").read_text(encoding="utf-8"), state.message, f"Report: {folder / 'report.html'}")
    say(_in_the_ui(state.state_details.flow_run_id))
    return CRITERION_FAILED if state.name in (NOT_MET, REJECTED) else 0


def _in_the_ui(flow_run_id: UUID | None) -> str:
    """Where the run can be looked at."""
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, PREFECT_UI_URL

    address = PREFECT_UI_URL.value()
    if PREFECT_API_URL.value() is not None and address:
        return f"In the UI: {address}/runs/flow-run/{flow_run_id}"
    stock = Path.home() / ".prefect"
    home = "" if PREFECT_HOME.value() == stock else f"PREFECT_HOME={PREFECT_HOME.value()} "
    return (
        f"To see this run in the UI: {home}prefect server start, then open "
        f"http://127.0.0.1:4200/runs/flow-run/{flow_run_id}"
    )


@command(ScaleSettings)
def scale(settings: ScaleSettings, debug: bool) -> int:
    """Run the same reads on one, two, four, … devices and measure how the time falls."""
    state = start("flows.scale:scale", settings, debug)
    say(state.message, f"Report: {settings.out / 'report' / 'report.html'}")
    return 0


@command(TuneSettings, "reads")
def tune(settings: TuneSettings, debug: bool) -> int:
    """Measure engine settings on this machine and these reads, and write the fastest that leave results alone."""
    state = start("flows.tune:tune", settings, debug)
    out = settings.out
    say(state.message, f"Use it: --settings {out / 'settings.toml'}", f"All figures: {out / 'tune.json'}")
    return 0


@command(ProfileSettings, "reads")
def profile(settings: ProfileSettings, debug: bool) -> int:
    """Run the reads, then record a few shards with torch's profiler: traces, and tables of stages and kernels."""
    state = start("flows.profile:profile", settings, debug)
    tables = Path(settings.out, "telemetry", "traces", "profile.md").read_text(encoding="utf-8")
    say(tables, state.message)
    return 0


Decision = Annotated[bool, Parameter(negative=())]
YesOrNo = Literal["yes", "no"]


class ApprovalOptions(Spec):
    """A reviewer's answer to a validation."""

    run: str = Field(description="flow run: its id or its name")
    yes: Decision = Field(False, description="approve")
    no: Decision = Field(False, description="reject")
    later: Decision = Field(False, description="leave it pending")
    reviewer: str | None = Field(None, description="who decides (default: the login name)")
    note: str = Field("", description="issues, adjustments, follow-up work")
    all_criteria_met: YesOrNo | None = Field(None, description="are all criteria met?")
    target_realistic: YesOrNo | None = Field(None, description="if not: was the target realistic?")
    tuning_could_help: YesOrNo | None = Field(None, description="if not: could tuning help?")
    code_fix_needed: YesOrNo | None = Field(None, description="if not: is a code fix needed?")
    esm2_still_bottleneck: YesOrNo | None = Field(None, description="is ESM-2 still the bottleneck?")

    def form(self) -> dict[str, Any]:
        """As the paused run takes it. Errors: `ConfigError` when there is not one decision."""
        decisions = {"approved": self.yes, "rejected": self.no, "pending": self.later}
        chosen = [verdict for verdict, wanted in decisions.items() if wanted]
        if len(chosen) != 1:
            raise ConfigError("give one of --yes, --no and --later; see virnuc approve --help")
        kept = self.model_dump(exclude={"run", "yes", "no", "later"}, exclude_none=True)
        return {"verdict": chosen[0], "reviewer": getpass.getuser(), **kept}


@command(ApprovalOptions, "run")
def approve(answer: ApprovalOptions, debug: bool) -> int:
    """ApprovalOptions a validation that was started with --approval and waits."""
    form = answer.form()
    prepare_prefect()
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.responses import SetStateStatus

    with get_client(sync_client=True) as client:
        flow_run = _find(client, answer.run)
        if flow_run.state is None or not flow_run.state.is_paused():
            name = "no state" if flow_run.state is None else flow_run.state.name
            raise ConfigError(f"flow run '{flow_run.name}' does not wait for an answer; it is {name}")
        response = client.resume_flow_run(flow_run.id, run_input=form)
    if response.status != SetStateStatus.ACCEPT:
        reason = getattr(response.details, "reason", None) or response.status.value
        raise VirnucError(f"flow run '{flow_run.name}': the answer was not accepted: {reason}")
    say(f"{flow_run.name}: {form['verdict']} by {form['reviewer']}")
    return 0


def _find(client: Any, run: str) -> Any:
    """The flow run of that id, or the one of that name that waits."""
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
