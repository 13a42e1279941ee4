"""The raw files of a validation, the metrics of one run from them, and where its time goes.

They are read without ever failing: what is not there is `None`, what is wrong is noted. Nothing is taken over that can
be computed from something rawer.

Where the time goes is told by two rules: stages of over 30 % of it, and GPU stages under 80 % utilisation. ESM-2 is
always over 30 %; while its GPU is busy that is expected, and only the rest is worth a person's time. The bottleneck is
the largest avoidable loss of time, by class, with what removing it would save at most."""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Final, TypeVar

import pandas as pd

from virnuc_core.errors import VirnucError
from virnuc_core.profiles import BaselineSpec, Profile
from virnuc_core.report import model
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import (
    Device,
    File,
    FileDigest,
    ModelFlops,
    RunCounts,
    RunRecord,
    RunSummary,
    digest,
    read,
)
from virnuc_core.telemetry import statistics
from virnuc_core.telemetry.log import Telemetry, read_telemetry
from virnuc_core.telemetry.tables import ENCODERS, GPU_STAGES, OVERLAPPED, STAGES, Encoder
from virnuc_core.validation import BaselineSummary

RUN_PREFIX: Final = "devices-"
BASELINE: Final = model.BASELINE
SUMMARY: Final = "summary.json"
RECORD: Final = "run.json"
COMPARISON: Final = "comparison.json"
VENDOR_WORDS: Final = re.compile("NVIDIA|GeForce|Tesla|Graphics Device")
NEVER: Final = (1.0, 0.0)  # a span that holds no sample
TIME_SHARE: Final = 0.30
BUSY_PERCENT: Final = 80.0
WORTH: Final = 0.05  # of the whole time: a smaller loss is not worth a person's
LONG_S: Final = 600.0
ADVICE: Final = tomllib.loads(Path(__file__).with_name("advice.toml").read_text(encoding="utf-8"))

Content = TypeVar("Content")


@dataclass
class RawFolder:
    """The files of one validate directory; remembers which were used and what could not be read."""

    root: Path
    used: set[str] = field(default_factory=set)
    problems: dict[str, str] = field(default_factory=dict)  # by file, a sentence each

    def read(self, kind: type[File], *parts: str) -> File | None:
        """The content of a file; `None` when it is missing, or one of its values is wrong, which is noted."""
        return self.attempt(self.root.joinpath(*parts), lambda path: read(path, kind))

    def telemetry(self, run: str, named: str | None) -> tuple[str, Telemetry] | None:
        """The telemetry of a run: the file its summary names, else the newest; `None` when there is none."""
        folder = self.root / run / "telemetry"
        path = (
            max(folder.glob("telemetry_*.h5"), default=None)
            if named is None
            else folder / f"{Path(named).stem}.h5"
        )
        if path is None or (found := self.attempt(path, read_telemetry)) is None:
            return None
        return path.relative_to(self.root).as_posix(), found

    def attempt(self, path: Path, load: Callable[[Path], Content]) -> Content | None:
        """What `load` makes of a file; `None` when it is missing, or cannot be read, which is noted."""
        if not path.is_file():
            return None
        name = path.relative_to(self.root).as_posix()
        self.used.add(name)
        try:
            return load(path)
        except VirnucError as error:
            self.problems[name] = f"{name}: {str(error).removeprefix(f'{path}: ')}"
            return None

    def evidence(self) -> dict[str, FileDigest]:
        """Size and digest of every file that was read, by name."""
        return {
            name: found
            for name in sorted(self.used)
            if (found := digest(self.root / name)) is not None
        }


def run_names(out: Path, prefix: str = RUN_PREFIX, most: int = 0) -> list[str]:
    """The run directories of a validation, fewest devices first, up to `most` unless that is 0; with `devices-N.` those
    that repeat the run on N."""
    folders = [
        folder.name.removeprefix(prefix) for folder in out.glob(f"{prefix}*") if folder.is_dir()
    ]
    numbers = sorted(filter(str.isdecimal, folders), key=int)
    return [f"{prefix}{number}" for number in numbers if not most or int(number) <= most]


def short_name(device: Device) -> str:
    """A device's name as the report prints it: `NVIDIA GeForce RTX 4090` is `RTX 4090`."""
    return (
        "CPU core"
        if device.kind == "cpu"
        else " ".join(VENDOR_WORDS.sub("", device.name).split()) or "GPU"
    )


def label(devices: Sequence[Device]) -> str:
    """`2x RTX 4090`; unlike devices are listed."""
    names = [short_name(device) for device in devices]
    return (
        " + ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names)) or "0x device"
    )


def run_metrics(raw: RawFolder, name: str, profile: Profile) -> model.RunMetrics | None:
    """The metrics of the run in folder `name`; `None` when it has neither summary nor record."""
    told, made = raw.read(RunSummary, name, SUMMARY), raw.read(RunRecord, name, RECORD)
    if told is None and made is None:
        return None
    summary, record = told or RunSummary(), made or RunRecord(fingerprints={})
    devices, flops = record.devices or summary.devices, summary.flops or ModelFlops()
    repeats = (raw.read(RunSummary, repeat, SUMMARY) for repeat in run_names(raw.root, f"{name}."))
    counts, *again = (_counts(one) for one in (summary, *repeats) if one is not None)
    # what lies there of one that was cut off is of an earlier attempt
    measured = None if summary.stopped_at_limit else raw.telemetry(name, summary.telemetry)
    precision = str(record.resolved.get("precision", ""))
    telemetry = (
        None if measured is None else telemetry_metrics(*measured, devices, flops, precision)
    )
    hours = device_hours = kwh = price = None
    if (
        counts.sequences_per_hour and counts.n_reads and counts.total_s
    ):  # of a run that did all its work
        hours, millions = profile.projection_reads / counts.sequences_per_hour, counts.n_reads / 1e6
        if devices:
            device_hours = len(devices) * counts.total_s / 3600.0 / millions
            energy, asked = (
                None if telemetry is None else telemetry.energy_kwh,
                profile.price_per_device_hour,
            )
            kwh = None if energy is None else energy / millions
            price = None if asked is None else device_hours * asked
    return model.RunMetrics(
        **dict(counts)
        | {"resumed": summary.resumed or bool(summary.shards_reused) or len(summary.attempts) > 1},
        name=name,
        devices=devices,
        label=label(devices),
        times_s=tuple(
            one.total_s for one in (counts, *again) if one.total_s and one.sequences_per_hour
        ),
        precision=precision or None,
        missing_files=tuple(
            path.name for path in RunDir(raw.root / name).tables[:3] if not path.is_file()
        ),
        telemetry=telemetry,
        hours_projected=hours,
        device_hours_per_million=device_hours,
        kwh_per_million=kwh,
        price_per_million=price,
    )


def _counts(summary: RunSummary) -> RunCounts:
    """What a run counted, and as its total the sum of its parts."""
    total_s = (
        None
        if summary.wall_s is None or summary.staging_s is None
        else summary.wall_s + summary.staging_s
    )
    return RunCounts(
        **{field: getattr(summary, field) for field in RunCounts.model_fields}
        | {"total_s": total_s}
    )


def telemetry_metrics(
    file: str, measured: Telemetry, devices: Sequence[Device], flops: ModelFlops, precision: str
) -> model.TelemetryMetrics:
    """What the batches, samples and shards of a telemetry file add up to."""
    batches, samples, names = (
        measured.batches,
        measured.samples,
        {device.id: device.name for device in devices},
    )
    busy, used = statistics.device_busy(measured.shards), []
    for device in names:  # while it embedded, and while each encoder ran on it
        own = batches[batches.device == device]
        whole, esm2, dnabert_s = (
            statistics.device_usage(samples, device, statistics.embedding_span(table) or NEVER)
            for table in (own, own[own.encoder == "esm2"], own[own.encoder == "dnabert_s"])
        )
        of_esm2 = {"esm2_percent": esm2.gpu_util_avg, "esm2_samples": esm2.sample_count}
        used.append(
            model.DeviceMetrics(**dict(whole), **of_esm2, dnabert_s_percent=dnabert_s.gpu_util_avg)
        )
    energies = [one.energy_kwh for one in used if one.energy_kwh is not None]
    parts = [(encoder, batches[batches.encoder == encoder]) for encoder in ENCODERS]
    return model.TelemetryMetrics(
        **dict(statistics.batch_metrics(batches)),
        file=file,
        encoders=tuple(
            encoder_metrics(e, own, names, flops, precision) for e, own in parts if len(own)
        ),
        devices=tuple(used),
        busy=busy,
        device_time_spread=statistics.device_time_spread(busy),
        energy_kwh=sum(energies) if energies and len(energies) == len(used) else None,
        host=statistics.host_usage(measured.host),
        alarms=statistics.alarms(samples, statistics.embedding_span(batches)),
    )


@cache
def datasheet_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of a device at a precision; `None` when the table does not have it."""
    sheets = tomllib.loads(
        Path(__file__).with_name("datasheets.toml").read_text(encoding="utf-8")
    )  # TFLOP/s
    peaks: dict[str, float] = next(
        (peaks for part, peaks in sheets.items() if part in device_name), {}
    )
    return peaks[precision] * 1e12 if precision in peaks else None


def encoder_metrics(
    encoder: Encoder,
    batches: pd.DataFrame,
    names: Mapping[str, str],
    flops: ModelFlops,
    precision: str,
) -> model.EncoderMetrics:
    """One encoder's batches, and what they used of the devices (`names`: id → model), each by its seconds: of what the
    linear layers alone sustain there and data sheets promise; unknown where one has no time, ceiling or sheet."""
    # DNABERT-S stays at fp16 where ESM-2 runs at int8
    arithmetic = "fp16" if precision == "int8" and encoder == "dnabert_s" else precision
    whole, per_token = (
        statistics.batch_metrics(batches, encoder),
        getattr(flops, f"{encoder}_per_token"),
    )
    spent = batches.groupby("device", observed=True).device_ms.sum(min_count=1) / 1000.0
    measured = getattr(
        flops, f"{encoder}_ceiling_tokens_s"
    )  # here, which may be one of a cluster's nodes
    ceilings = pd.Series(
        [measured.get(str(name).partition("@")[0]) for name in spent.index], spent.index, "float64"
    )
    peaks = [datasheet_flops(names.get(str(device), ""), arithmetic) for device in spent.index]
    possible = statistics.known((spent * ceilings).sum(skipna=False))  # tokens
    promised = statistics.known(
        (spent * pd.Series(peaks, spent.index, "float64")).sum(skipna=False)
    )  # FLOPs
    return model.EncoderMetrics(
        **dict(whole),
        encoder=encoder,
        ceiling_tokens_per_s=possible / float(spent.sum()) if possible else None,
        mfu_of_ceiling=whole.tokens / possible if possible else None,
        mfu_of_datasheet=whole.tokens * per_token / promised if per_token and promised else None,
    )


def baseline_metrics(
    raw: RawFolder, profile: Profile, run: model.RunMetrics | None
) -> model.BaselineMetrics | None:
    """The baseline's time: measured, scaled by tokens from a subset, or recorded for the very same devices; without
    staging, which is in its favour: it reads the rows from the store."""
    summary = raw.read(BaselineSummary, BASELINE, SUMMARY)
    spec = profile.baseline
    if (
        summary is not None and summary.source == "recorded" and spec.source == "measured"
    ):  # it was given at the start
        names = [device.name for device in summary.devices]
        told = {"recorded_device": names[0], "recorded_devices": len(names)} if names else {}
        told |= {"recorded_seconds": summary.wall_s, "recorded_reads": summary.n_reads}
        spec = spec.model_copy(update={"name": summary.name, "source": "recorded", **told})
    if spec.source == "recorded":
        return _recorded_baseline(spec, spec.recorded_reads or profile.target_reads, run)
    if summary is None:
        return None
    subset, problem = summary.subset, None
    if summary.measured_s is None or summary.wall_s is None:
        problem = "the baseline's time was not recorded"
    elif subset is not None and not 0 < subset.tokens <= subset.total_tokens:
        problem = "the baseline ran on a subset, but what it stands for is not recorded"
    return model.BaselineMetrics(
        name=summary.name,
        label=label(summary.devices),
        models=tuple(dict.fromkeys(map(short_name, summary.devices))),
        source="measured" if subset is None else "scaled",
        seconds=None if problem else summary.wall_s,
        subset=subset,
        problem=problem,
    )


def _recorded_baseline(
    spec: BaselineSpec, reads: int | None, run: model.RunMetrics | None
) -> model.BaselineMetrics:
    """A recorded time, which counts only where devices and `reads` are those it was recorded on."""
    recorded = f"{spec.recorded_devices or 0}x {spec.recorded_device or 'unknown'}"
    problem = None
    if spec.recorded_seconds is None or not spec.recorded_device or spec.recorded_devices is None:
        problem = "no time, device name and number of devices was recorded"
    elif run is None or not run.devices:
        problem = "there is no run to compare with"
    elif len(run.devices) != spec.recorded_devices or any(
        spec.recorded_device not in d.name for d in run.devices
    ):
        problem = (
            f"for reference only: the recorded time is of {recorded}, this run was on {run.label}"
        )
    elif reads is None or (run.n_reads or 0) < reads:
        problem = f"for reference only: the recorded time is of {reads or 'unknown'} reads, this run had {run.n_reads}"
    return model.BaselineMetrics(
        name=spec.name,
        label=recorded,
        models=() if spec.recorded_device is None else (spec.recorded_device,),
        source="recorded",
        seconds=spec.recorded_seconds,
        problem=problem,
    )


def scaling_metrics(
    single: model.RunMetrics | None, many: model.RunMetrics | None
) -> model.ScalingMetrics | None:
    """One device against N; `None` when a time is missing, a run was resumed, or the work was not the same."""
    if single is None or many is None or not single.times_s or not many.times_s or not many.devices:
        return None
    if (
        (single.n_reads, single.n_rows) != (many.n_reads, many.n_rows)
        or single.untimed
        or many.untimed
    ):
        return None
    time_s = median(many.times_s)
    speedup = median(single.times_s) / time_s
    pairs = [(single.stages.get(stage), many.stages.get(stage)) for stage in GPU_STAGES.values()]
    dnabert_s, esm2 = (one / other if one is not None and other else None for one, other in pairs)
    return model.ScalingMetrics(
        num_gpus=len(many.devices),
        time_seconds=time_s,
        times_s=many.times_s,
        speedup=speedup,
        efficiency=speedup / len(many.devices),
        esm2_scaling=esm2,
        dnabert_scaling=dnabert_s,
    )


def findings(run: model.RunMetrics | None) -> tuple[str, ...]:
    """A sentence on each stage the two rules point at, largest share first; no time or no total gives none."""
    if run is None:
        return ()
    found, measured = [], run.telemetry
    advised = {
        stage: one["advice"] for one in ADVICE["losses"].values() for stage in one["stages"]
    } | ADVICE["stages"]
    busiest = (
        {stage: measured.lowest_percent(encoder) for encoder, stage in GPU_STAGES.items()}
        if measured
        else {}
    )
    for name in STAGES:
        share, used = run.stage_shares.get(name, 0.0), busiest.get(name)
        idle = used is not None and used < BUSY_PERCENT
        if share > TIME_SHARE or idle:
            expected = name == "ESM-2" and not idle
            advice = _further(run) if expected else ADVICE["busy"] if idle else advised[name]
            busy = "" if used is None else f", the lowest GPU {used:.1f} % busy"
            word = "expected" if expected else "actionable"
            found.append(
                (-share, f"{name} takes {100 * share:.1f} % of the time{busy} ({word}): {advice}.")
            )
    return tuple(text for _, text in sorted(found))


def _further(run: model.RunMetrics) -> str:
    """What helps where the encoders do their work well."""
    return str(ADVICE["gpu" if (run.total_s or 0.0) >= LONG_S else "work"])


def losses(run: model.RunMetrics | None) -> tuple[model.Bottleneck, ...]:
    """Every avoidable loss of time, the largest first; never empty."""
    if run is None or not run.total_s:
        return (model.Bottleneck(kind="unknown", detail="no run was timed", advice="run validate"),)
    spent = {row: seconds for row, seconds in run.stages.items() if seconds}
    found = [*_computing(run, spent)]
    for kind, loss in ADVICE["losses"].items():
        own = sorted(((spent[row], row) for row in loss["stages"] if row in spent), reverse=True)
        # what passed while the reads were staged saves nothing, whichever of the two is removed
        hidden_s = spent.get(OVERLAPPED, 0.0) if kind in ("start-up", "staging") else 0.0
        whole_s = sum(seconds for seconds, _ in own)
        detail = ", ".join(
            f"{row} {seconds:.1f} s" for seconds, row in own if seconds > WORTH * whole_s
        )
        found.append((whole_s - hidden_s, kind, detail, loss["advice"], False))
    ranked = tuple(
        model.Bottleneck(
            kind=kind,
            detail=detail,
            advice=advice,
            saves_s=saves_s,
            share=share,
            expected=good or share < WORTH,
        )
        for saves_s, kind, detail, advice, good in sorted(found, reverse=True)
        if (share := saves_s / run.total_s) > 0
    )
    return ranked or (
        model.Bottleneck(
            kind="unknown", detail="no stage was measured", advice="look at the log of the run"
        ),
    )


def _computing(
    run: model.RunMetrics, spent: Mapping[str, float]
) -> Iterator[tuple[float, str, str, str, bool]]:
    """What devices at work lose, by slots without a token and by speed below the measured ceiling, else below full
    utilisation: seconds, class, detail, the way out, and whether they do their work well."""
    still_s = spent.get("Device idle", 0.0)
    empty_s, slow_s, said, idle = (
        0.0,
        still_s,
        [f"a device stands still for {still_s:.1f} s"],
        False,
    )
    measured = run.telemetry
    for found in measured.encoders if measured else ():
        stage, packing, share = GPU_STAGES[found.encoder], found.packing_efficiency or 1.0, 1.0
        if measured and (used := measured.lowest_percent(found.encoder)) is not None:
            idle, share = idle or used < BUSY_PERCENT, used / 100.0
            said.append(f"{stage} keeps the lowest GPU {used:.1f} % busy")
        if found.mfu_of_ceiling is not None:
            share = found.mfu_of_ceiling / packing
            said.append(
                f"{stage} runs at {100 * share:.0f} % of what its linear layers alone sustain"
            )
        empty_s += spent.get(stage, 0.0) * (1.0 - packing)
        slow_s += spent.get(stage, 0.0) * packing * max(0.0, 1.0 - share)
    good = not idle and still_s <= slow_s / 2
    yield slow_s, "GPU compute", "; ".join(said), _further(run) if good else ADVICE["busy"], good
    yield empty_s, "packing", "slots without a token", "raise token_budget or shard_tokens", False
