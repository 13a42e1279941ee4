"""What each flow beside `predict` takes, one flat model each, and the command that starts it; and `virnuc approve`."""

import getpass
import logging
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field

from virnuc.flows.parameters import Flag, FlowSettings, RunSettings, command
from virnuc.flows.start import prepare_prefect, say, starts, writable
from virnuc_core.config import (
    SWITCHES,
    Attention,
    ClusterSpec,
    Precision,
    Switch,
    TraceOptions,
    TrainSpec,
    VerdictSpec,
)
from virnuc_core.errors import ConfigError, VirnucError
from virnuc_core.profiles import Profile, Review
from virnuc_core.rundir import (
    ALL_FILES,
    MARKER_FILE,
    NESTED_RUNS,
    RunDir,
    discard,
    is_ours,
    run_lock,
)

# of the moment, UTC, for which a run was planned: a run tried again goes on where it was
DATED: Final = "%Y-%m-%dT%H%M"
SHAPE: Final = "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]T[0-9][0-9][0-9][0-9]"
LATEST: Final = "latest"
PROFILE_HELP: Final = "sizes and thresholds: a name that `virnuc profiles` lists, or a .toml file"
log = logging.getLogger(__name__)


class InboxSettings(VerdictSpec, FlowSettings):
    """Predict each new file of a folder, once."""

    inbox: Path = Field(description="folder that is watched; files are told apart by their content")
    out: Path = Field(
        description="results: one run directory per content, and inbox.tsv with each file's fate"
    )
    interleaved: bool = Field(False, description="mates follow each other in every file")
    pairs: bool = Field(True, description="mates that follow each other in a BAM file are pairs")
    settle_s: float = Field(
        60.0, ge=0, description="a file changed within this many seconds may still be arriving"
    )
    retry_failed: bool = Field(False, description="predict again what failed before")

    def check_own_files(self) -> None:
        """Refuse an inbox that is no folder. Errors: those of `Ledger`."""
        from virnuc_core.inbox import Ledger

        Ledger(self.inbox, self.out)


predict_inbox = starts("predict-inbox", InboxSettings)


def keep_newest(night: Path, keep: int) -> None:
    """Let `latest` beside a night's directory point to it, and remove all but the `keep` newest beside it: only those
    that a date names and that are ours, by the names of our files, and that nobody works in. Errors: `OSError`."""
    root = night.parent
    latest, aside = root / LATEST, root / f".{LATEST}.{os.getpid()}.part"
    if latest.is_symlink() or not latest.exists():
        aside.unlink(missing_ok=True)
        aside.symlink_to(night.name)
        os.replace(aside, latest)
    else:
        log.warning("%s is no link and stays as it is; the newest run is %s", latest, night.name)
    dated = sorted(
        path
        for path in root.glob(SHAPE)
        if path.is_dir() and not path.is_symlink() and is_ours(path)
    )
    for old in set(dated[:-keep]) - {night}:
        try:
            with run_lock(old):
                discard(
                    old, *ALL_FILES, MARKER_FILE, *(f"{run}/{MARKER_FILE}*" for run in NESTED_RUNS)
                )
        except ConfigError as error:
            log.warning("%s; it is kept", error)


class MeasureSettings(ClusterSpec, RunSettings):
    """Runs whose figures are judged."""

    out: Path = Field(description="directory of the runs and the report")
    profile: str = Field("phase10-1m", min_length=1, description=PROFILE_HELP)
    history: Path | None = Field(
        None, description="file of past runs; else virnuc-history.jsonl beside the output"
    )
    fail_on_criteria: bool = Field(
        True, description="a criterion missed, or a reviewer's no, fails the flow run"
    )
    keep: int | None = Field(
        None,
        ge=1,
        description="each run in a dated directory in OUT, the newest also as OUT/latest; so many are kept",
    )

    @property
    def newest(self) -> Path:
        """Where the newest run lies."""
        return self.out if self.keep is None else self.out / LATEST

    def placed(self, moment: datetime) -> Self:
        """The settings of a run that starts at this moment: in a directory of that date, if runs are kept apart."""
        return (
            self
            if self.keep is None
            else self.model_copy(update={"out": self.out / f"{moment:{DATED}}"})
        )

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the output directory; of dated ones the oldest go once this one has a verdict."""
        with super().hold():
            yield
        if self.keep is not None:
            keep_newest(self.out, self.keep)

    @property
    def history_file(self) -> Path:
        """Where the run's line goes."""
        return self.history or self.out.absolute().parent / "virnuc-history.jsonl"

    def check_own_files(self) -> None:
        """Refuse a history to which no line can be added; the runs before it may take hours."""
        path = self.history_file
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise ConfigError(
                f"history {path}: no file that can be written; choose another with --history"
            )
        if self.history or self.keep is None:  # else it is in OUT
            writable(path.parent)


class ValidateSettings(MeasureSettings):
    """Does this machine, with these weights, meet the profile?"""

    baseline_results: Path | None = Field(
        None,
        description="the baseline's result files of an earlier run over these reads, or their directory",
    )
    baseline_seconds: float | None = Field(
        None, gt=0, description="that run's time, with --baseline-device"
    )
    baseline_device: str | None = Field(
        None, description="what that run was on: 2x RTX 4090", pattern=r"^[1-9]\d*x \S"
    )
    tune_rounds: int = Field(
        0, ge=0, le=10, description="times to tune what a missed speed hangs on, and judge again"
    )
    approval: bool = Field(
        False, description="pause after the report until a reviewer has answered"
    )
    approval_timeout_s: int = Field(
        86_400, ge=1, description="without an answer by then the approval is pending"
    )

    def inputs(self) -> tuple[str, ...]:
        """The files of local reads and of an earlier baseline. Errors: `InputError`, too for results that are none."""
        from virnuc_core.report.compare import result_files

        given = {} if self.baseline_results is None else result_files(self.baseline_results)
        return (*super().inputs(), *map(str, given.values()))

    def check_own_files(self) -> None:
        """Refuse a time without a device, rounds of tuning on a cluster, and a history of no use."""
        super().check_own_files()
        if self.tune_rounds and self.cluster:
            raise ConfigError(
                "tune_rounds: a cluster's settings are not swept; run virnuc tune on one of its machines"
            )
        if (self.baseline_seconds is None) != (self.baseline_device is None):
            raise ConfigError(
                "baseline: a time needs the device it was measured on, and a device needs a time"
            )

    def with_baseline(self, profile: Profile, reads: int) -> Profile:
        """The profile with the earlier baseline over these `reads` in place of its own, where one was given."""
        given: dict[str, Any] = {"source": "recorded", "results": self.baseline_results}
        if self.baseline_device is not None:
            count, _, device = self.baseline_device.partition("x ")
            given |= {"recorded_seconds": self.baseline_seconds, "recorded_device": device}
            given |= {"recorded_devices": int(count), "recorded_reads": reads}
        elif self.baseline_results is None:
            return profile
        return profile.model_copy(update={"baseline": profile.baseline.model_copy(update=given)})


validate = starts("validate", ValidateSettings, "reads")


class ScaleSettings(MeasureSettings):
    """How does the time fall with the number of devices?"""

    profile: str = Field(
        "phase6-scaling", min_length=1, description="sizes and bands: a name, or a .toml file"
    )
    repeats: int = Field(
        1, ge=1, le=20, description="runs on each number of devices; their median counts"
    )


scale = starts("scale", ScaleSettings, "reads")
Slots = Annotated[int, Field(ge=64, le=1 << 20)]
Loaders = Annotated[int, Field(ge=0, le=64)]
Batches = Annotated[int, Field(ge=1, le=64)]
_SWEEPS: Final = tomllib.loads(Path(__file__).with_name("sweeps.toml").read_text(encoding="utf-8"))
SWEPT: Final[dict[str, str]] = _SWEEPS["settings"]
KNOBS: Final[dict[str, dict[str, list[Any]]]] = _SWEEPS["knobs"]


class TuneSettings(RunSettings):
    """Which settings are fastest here? Lists left empty are not swept."""

    out: Path = Field(
        description="directory of the sweep: tune.json, settings.toml and every trial"
    )
    profile: str = Field("phase10-1m", min_length=1, description=PROFILE_HELP)
    grid: Literal["lists", "quick", "full"] = Field(
        "lists",
        description="quick: 3 x 3 loader workers and batches kept ready; full: 4 x 3 x 3, budgets too",
    )
    search: Literal["halving", "grid"] = Field(
        "halving", description="halving drops the slower half after each round"
    )
    repeats: int = Field(
        3, ge=1, le=20, description="measurements of each candidate that stays in the running"
    )
    token_budgets: tuple[Slots, ...] = Field(
        (8_192, 16_384, 32_768), description="slots of one ESM-2 batch to try"
    )
    dna_token_budgets: tuple[Slots, ...] = Field(
        (), description="slots of one DNABERT-S batch to try"
    )
    attentions: tuple[Attention, ...] = Field((), description="attention backends to try")
    precisions: tuple[Precision, ...] = Field((), description="precisions to try")
    loader_workers: tuple[Loaders, ...] = Field(
        (0, 2, 4), description="loader processes of one device to try"
    )
    prefetch_factors: tuple[Batches, ...] = Field(
        (2, 4), description="batches kept ready for each loader to try"
    )
    shard_sizes: tuple[Annotated[int, Field(ge=64)], ...] = Field(
        (), description="ESM-2 tokens of one shard to try"
    )

    def swept(self) -> Mapping[str, Sequence[Any]]:
        """Engine settings and the values to try, without those that are not swept; a named grid goes first."""
        lists = _SWEEPS["grids"].get(self.grid) or {
            engine: getattr(self, own) for own, engine in SWEPT.items()
        }
        return {name: values for name, values in lists.items() if values}


tune = starts("tune", TuneSettings, "reads")


class ProfileSettings(TraceOptions, RunSettings):
    """Where does the time of a run go, down to the kernels?"""

    out: Path = Field(
        description="run directory; traces and tables are written to its telemetry/traces/"
    )


profile = starts("profile", ProfileSettings, "reads")


class OverheadSettings(FlowSettings):
    """What do commits, the sampler and loading the models anew cost?"""

    out: Path = Field(description="directory of a finished validation")
    switches: tuple[Switch, ...] = Field(
        SWITCHES, min_length=1, description="what is switched on and off"
    )
    pairs: int = Field(3, ge=1, description="pairs of runs for each; fewer than 3 say nothing")
    shards: int = Field(16, ge=1, description="shards of each run, for each device")
    force: bool = Field(False, description="measure again what was measured before")

    @property
    def profile(self) -> Profile:
        """That the validation was started with. Errors: `ConfigError` for a directory without one."""
        from virnuc_core.validation import ValidationRecord, read_usable  # it brings torch along

        record = read_usable(RunDir(self.out).record, ValidationRecord)
        if record is None or record.profile is None:
            raise ConfigError(
                f"{self.out}: no validation (its run.json names no profile); run virnuc validate first"
            )
        return record.profile

    def check_place(self) -> None:
        """Refuse what is no validation. Errors: those of `profile`."""
        _ = self.profile


overhead = starts("overhead", OverheadSettings, "out")


class TrainSettings(TrainSpec, RunSettings):
    """Fit the head on labelled reads."""

    pairs: bool = Field(
        False, description="files of a folder called _R1 and _R2, or _1 and _2, hold pairs"
    )
    out: Path = Field(
        description="run directory of the training embeddings; the head is written to OUT/head"
    )
    models: Path = Field(
        description="models directory: esm2/ and dnabert_s/; it needs no head/ with --model-length"
    )
    model_length: int | None = Field(
        None, ge=3, le=1 << 20, description="bases of a chunk; default: the old head's"
    )
    install: bool = Field(
        False, description="put a head better than chance, and than the old one, into the models"
    )
    install_anyway: bool = Field(
        False, description="put the head into the models directory, however good it is"
    )

    def inputs(self) -> tuple[str, ...]:
        """The files of local reads, and those that tell of the genomes."""
        return (
            *super().inputs(),
            *map(str, filter(None, (self.truth, self.groups, self.genomes, self.coding_only))),
        )

    def check_own_files(self) -> None:
        """Refuse a table of origins that is not fit. Errors: those of `read_truth`; `ConfigError`."""
        from virnuc_core.training.evaluation import read_truth  # it brings scikit-learn along

        read_truth(self.truth)
        if self.coding_only is not None and self.genomes is None:
            raise ConfigError(
                "coding_only: the annotation needs the sequences it is of; give --genomes"
            )


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
