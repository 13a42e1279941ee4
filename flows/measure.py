"""What `validate` and `scale` share: the same reads staged once, run on several numbers of devices and judged."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from flows import preflight
from flows.crash_detection import announce
from flows.parameters import MeasureSettings
from tasks.baseline import baseline
from tasks.compare import BASELINE, compare
from tasks.embed import embed
from tasks.limit import TimeLimitError
from tasks.report import publish, record_validation, report
from tasks.stage import stage
from tasks.tools import ceiling, overhead
from virnuc_core.config import Devices, Profile
from virnuc_core.measure.bench import Bench
from virnuc_core.pipeline import model_length, read_summary
from virnuc_core.reads.stage import StageSpec, StageSummary
from virnuc_core.report.build import RUN_PREFIX
from virnuc_core.report.model import Report
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import ModelFlops

HISTORY = "virnuc-history.jsonl"


def measure(
    settings: MeasureSettings, profile: Profile, label: str, counts: Sequence[int], *, with_baseline: bool
) -> Report:
    """Run on each of `counts` devices, after the baseline if it is wanted, and judge what was measured."""
    found = preflight.devices(settings, profile.engine)
    devices = preflight.named(found)
    announce(label, profile.name, devices.kind)
    out, store, length = settings.out, RunDir(settings.out).store, model_length(settings.models)
    spec = StageSpec(
        reads=settings.reads,
        model_length=length,
        workers=settings.staging_processes,
        on_error=settings.on_error,
        strict=settings.strict,
    )
    staging = stage(spec, store, label=label, email=settings.email, force=settings.force).result()
    record_validation(
        out,
        spec=settings.model_dump(mode="json") | {"engine": settings.engine(profile.engine).model_dump(mode="json")},
        profile=profile,
        models=settings.models,
        staging=staging,
        model_length=length,
        devices=found,
        force=settings.force,
    )
    subset = with_baseline and _baseline(settings, profile, label, devices, store)
    flops = _ceiling(settings, profile, devices, counts)
    names = _runs(settings, profile, label, devices, staging, counts, flops)
    if profile.targets.checkpoint_overhead is not None:
        _commits(settings, profile, label, devices)
    compare(out, names, tolerance=profile.score_tolerance, subset=subset, label=label).result()
    judged = report(out, profile, history=_history(settings), label=label).result()
    publish(judged, out, label)
    return judged


def _baseline(settings: MeasureSettings, profile: Profile, label: str, devices: Devices, store: Path) -> bool:
    """Run the baseline; whether it covers a part of the reads only."""
    summary = baseline(
        RunDir(settings.out / BASELINE),
        store=store,
        models=settings.models,
        devices=devices,
        spec=profile.baseline,
        label=label,
        force=settings.force,
    ).result()
    return summary.subset is not None


def _ceiling(settings: MeasureSettings, profile: Profile, devices: Devices, counts: Sequence[int]) -> ModelFlops | None:
    """The GPUs' ceilings; None without a GPU, or when every run is there already and nothing is to be computed."""
    complete = all(read_summary(RunDir(settings.out / f"{RUN_PREFIX}{count}")) is not None for count in counts)
    if devices.kind != "cuda" or (complete and not settings.force):
        return None
    return ceiling(
        settings.out, models=settings.models, devices=devices, engine=settings.engine(profile.engine)
    ).result()


def _runs(
    settings: MeasureSettings,
    profile: Profile,
    label: str,
    devices: Devices,
    staging: StageSummary,
    counts: Sequence[int],
    flops: ModelFlops | None,
) -> tuple[str, ...]:
    """Names of the runs that came to an end."""
    names = []
    for count in counts:
        name = f"{RUN_PREFIX}{count}"
        with suppress(TimeLimitError):  # the run's summary says so, and the report calls it a failure
            embed(
                RunDir(settings.out / name),
                staging,
                store=RunDir(settings.out).store,
                models=settings.models,
                devices=devices.first(count),
                engine=settings.engine(profile.engine),
                label=label,
                force=settings.force,
                window_s=profile.window_s,
                sample_s=profile.sample_s,
                time_limit_s=profile.time_limit_s,
                flops=flops,
            ).result()
            names.append(name)
    return tuple(names)


def _commits(settings: MeasureSettings, profile: Profile, label: str, devices: Devices) -> None:
    """Time what commits cost, on all devices."""
    bench = Bench(RunDir(settings.out).store, settings.models, devices)
    engine = settings.engine(profile.engine)
    overhead(settings.out, bench, engine, label=label, force=settings.force).result()


def _history(settings: MeasureSettings) -> Path:
    return settings.history if settings.history is not None else settings.out.absolute().parent / HISTORY
