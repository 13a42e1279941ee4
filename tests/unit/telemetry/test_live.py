"""Live totals and what people see of them, on a terminal and elsewhere."""

from __future__ import annotations

import io
import logging
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from virnuc_core.telemetry import live
from virnuc_core.telemetry.live import (
    InferenceProgressReporter,
    clock_text,
    pipeline_summary,
    shared_console,
)
from virnuc_core.telemetry.sampler import Sampler
from virnuc_core.telemetry.tables import STAGES, DeviceSample, ShardDone, StageClock

from .measurements import batch, shard
from .screen import screen

DEVICES = ("GPU-a", "GPU-b")


def test_names_in_lines_of_the_log_are_shown_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared_console().print("lung:x:1.fq [red]")
    assert "lung:x:1.fq [red]" in capsys.readouterr().err


class Clock:
    """A clock moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def read_gpu(device: str, time_s: float) -> DeviceSample:
    """Read one of two GPUs that are always as busy."""
    return DeviceSample(time_s, device, {"GPU-a": 90.0, "GPU-b": 70.0}[device], 1 << 30)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def sampler() -> Sampler:
    sampler = Sampler(DEVICES, read=read_gpu)
    sampler.sample_once()
    return sampler


def done(rows: int, device: str = "GPU-a") -> ShardDone:
    """A shard of one batch of ESM-2."""
    return shard(0, [batch(0, rows=rows, device=device)], device=device)


def reporter(total: int, sampler: Sampler, **options: Any) -> InferenceProgressReporter:
    console = options.pop("console", Console(file=io.StringIO(), force_terminal=False))
    progress = InferenceProgressReporter(
        total, sampler, **{"on_progress": lambda _: None, **options}
    )
    progress._console = console
    return progress


def shown(progress: InferenceProgressReporter, *devices: str) -> tuple[Any, ...]:
    """Rows done, speed, utilisation and packing."""
    texts = progress.progress(*devices)
    return (texts.completed, texts.tokens, texts.gpu, texts.pack)


def test_totals_by_device_and_together(sampler: Sampler, clock: Clock) -> None:
    progress = reporter(100, sampler)
    progress.update(shard(0, [batch(0), batch(1, tokens=500)]))
    progress.update(done(10, "GPU-b"))
    clock.now = 10.0
    assert shown(progress, "GPU-a") == (20, "140 tok/s", "90 %", "70.0 %")
    assert shown(progress) == (30, "230 tok/s", "80 %", "76.7 %")


def test_before_anything_is_done_nothing_is_known(clock: Clock) -> None:
    progress = reporter(100, Sampler(("cpu-core-0",)))
    assert shown(progress) == (0, "- tok/s", "n/a", "n/a")
    assert progress.eta == "--:--"


def test_plain_lines_come_every_few_seconds_and_can_be_grepped(
    sampler: Sampler, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), reporter(100, sampler) as progress:
        for second in range(1, 26):
            clock.now = float(second)
            progress.update(done(1))
    lines = caplog.messages
    assert len(lines) == 3, "at 10 s, at 20 s, and at the end"
    assert re.search(r"10 of 100 sequences \(10\.0 %\)", lines[0])
    assert "ETA 01:30" in lines[0]
    assert all(re.search(r"gpu.*util", line) for line in lines)
    assert all(re.search(r"packing.*efficiency 90\.0 %", line) for line in lines)


def test_without_a_gpu_the_line_says_so(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), reporter(10, Sampler(("cpu-core-0",))):
        pass
    (line,) = caplog.messages
    assert "gpu util n/a" in line


@pytest.mark.parametrize(("width", "pack"), [(80, False), (120, True)])
def test_on_a_terminal_there_is_a_bar_for_each_device_and_one_for_all(
    sampler: Sampler, clock: Clock, width: int, pack: bool
) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=width, legacy_windows=False)
    with reporter(6_000_000, sampler, console=console, already_done=1_000_000) as progress:
        clock.now = 100.0
        progress.update(done(250_000))
        console.print(
            "12:00:00  cpu-core-0 ready after 3.8 s"
        )  # as a log line, which shares the console
        progress.update(done(250_000, "GPU-b"))
    line, first_bar, second_bar, total = screen(text.getvalue(), width)
    assert line == "12:00:00  cpu-core-0 ready after 3.8 s"
    assert (first_bar.split()[0], second_bar.split()[0], total.split()[0]) == (
        "GPU-a",
        "GPU-b",
        "Embedding",
    )
    for words in ("25%", "1,500,000/6,000,000", "80 % GPU", "ETA 15:00"):
        assert words in total
    assert "90 % GPU" in first_bar
    assert "70 % GPU" in second_bar
    assert ("90.0 % pack" in total) is pack


def test_in_a_notebook_the_bars_stand_in_a_cell(
    sampler: Sampler, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells: list[str] = []

    class Notebook:
        """What IPython shows in a cell, and brings up to date."""

        def display(self, bars: Any, display_id: bool) -> Notebook:
            assert display_id
            self.update(bars)
            return self

        def update(self, bars: Any) -> None:
            cells.append(bars._repr_mimebundle_((), ())["text/html"])

    monkeypatch.setitem(sys.modules, "IPython.display", Notebook())  # type: ignore[arg-type]
    console = Console(file=io.StringIO(), force_jupyter=True, width=120)
    with reporter(100, sampler, console=console) as progress:
        progress.update(done(40))
    assert "0/100" in cells[0]
    assert "40/100" in cells[1]
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


def test_cores_have_no_gpu_column(clock: Clock) -> None:
    text, cores = io.StringIO(), Sampler(("cpu-core-0", "cpu-core-1"))
    console = Console(file=text, force_terminal=True, width=80, legacy_windows=False)
    with reporter(100, cores, console=console) as progress:
        clock.now = 5.0
        progress.update(done(10, "cpu-core-0"))
    bars = screen(text.getvalue(), 80)
    assert [bar.split()[0] for bar in bars] == ["cpu-core-0", "cpu-core-1", "Embedding"]
    assert "GPU" not in "".join(bars)
    assert "ETA 00:45" in bars[2]


def test_the_callback_is_throttled_and_gets_the_end(sampler: Sampler, clock: Clock) -> None:
    fractions: list[float] = []
    with reporter(40, sampler, on_progress=fractions.append) as progress:
        for tick in range(1, 41):
            clock.now = tick / 2
            progress.update(done(1))
    assert fractions == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert progress.eta == "00:00"


def test_what_an_earlier_run_did_does_not_make_this_one_faster(
    sampler: Sampler, clock: Clock
) -> None:
    with reporter(100, sampler, already_done=80) as progress:
        assert progress.eta == "--:--"
        clock.now = 10.0
        progress.update(done(10))
        assert progress.eta == "00:10"


def test_the_speed_counts_from_the_first_batch(sampler: Sampler, clock: Clock) -> None:
    """Weights that take 30 s to load neither slow the rate nor push the end away."""
    with reporter(100, sampler) as progress:
        clock.now = 40.0
        progress.update(shard(0, [batch(30.0), batch(35.0)]))
        assert progress.progress().tokens == "180 tok/s"
        assert progress.eta == "00:40"


def test_a_run_of_nothing_is_done(clock: Clock) -> None:
    progress = reporter(0, Sampler(()))
    assert (progress.share, progress.eta) == (1.0, "00:00")


def test_a_stage_that_runs_twice_adds_up() -> None:
    clock = StageClock()
    clock.add("ESM-2", 2.0, (10.0, 12.0))
    clock.add("ESM-2", 3.0, (20.0, 23.0))
    (stage,) = clock.times()
    assert (stage.name, stage.seconds, stage.started_s, stage.finished_s) == ("ESM-2", 5, 10, 23)


def test_stages_come_in_the_order_of_the_nine() -> None:
    clock = StageClock()
    for name in reversed(STAGES):
        clock.add(name, 1.0)
    assert tuple(stage.name for stage in clock.times()) == STAGES


def test_a_fused_stage_has_no_time_of_its_own() -> None:
    clock = StageClock()
    clock.fuse("Feature Merging", "ESM-2")
    (stage,) = clock.times()
    assert (stage.seconds, stage.fused_into) == (None, "ESM-2")


def test_the_summary_block_is_found_by_the_usual_greps() -> None:
    clock = StageClock()
    clock.add("Sequence Chunking", 7.3)
    clock.fuse("Feature Merging", "ESM-2")
    clock.add("ESM-2", 1383.2)
    lines = pipeline_summary(clock.times(), 2025.0).splitlines()
    heading_index = lines.index("PIPELINE SUMMARY")
    lines_after = lines[heading_index + 1 : heading_index + 16]  # grep -A 15
    assert [
        line.split(": ")[1].split(" .")[0] for line in lines_after if line.startswith("Stage ")
    ] == list(STAGES)
    (total,) = [line for line in lines_after if "Total wall time" in line]
    assert re.search(r"Total wall time: 33:45 \(2025\.0 s\)", total)
    assert any(
        re.fullmatch(r"Stage 6: ESM-2 \.+  1383\.2 s \(68\.3 %\)", line) for line in lines_after
    )
    assert any("0.0 s (fused into ESM-2)" in line for line in lines_after)
    assert sum("not measured" in line for line in lines_after) == 6
    assert not any(line.startswith("The rest") for line in lines_after)
    for name, seconds in (
        ("Start-up: weights", 12.34),
        ("Result files", 0.01),
        ("Overlapped", 3.0),
    ):
        clock.add(name, seconds)
    lines = pipeline_summary(clock.times(), 2025.0).splitlines()
    assert lines[-3:-1] == [
        "The rest: Start-up: weights 12.3 s",
        "Of this, 3.0 s passed at the same time as other parts.",
    ]
    assert "-3.0" not in "".join(lines)


def test_no_total_divides_by_nothing() -> None:
    clock = StageClock()
    clock.add("ESM-2", 0.0)
    assert "0.0 s" in pipeline_summary(clock.times(), 0.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "00:00"), (59.999, "00:59"), (3599.9, "59:59"), (3600, "1:00:00"), (-5, "00:00")],
)
def test_times_are_cut_not_rounded(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


def test_a_stage_may_have_fewer_seconds_than_its_span() -> None:
    clock = StageClock()
    clock.add("ESM-2", 4.0, (10.0, 20.0))
    clock.add("ESM-2", 0.0, (8.0, 12.0))
    (esm2,) = clock.times()
    assert (esm2.seconds, esm2.started_s, esm2.finished_s) == (4.0, 8.0, 20.0)
