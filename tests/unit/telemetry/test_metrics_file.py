"""The file of live figures, read as a collector of Prometheus reads it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from virnuc_core.errors import ConfigError
from virnuc_core.telemetry import metrics_file as module
from virnuc_core.telemetry.metrics_file import FIRST_LINE, MetricsFile, require_metrics_file
from virnuc_core.telemetry.sampler import Sampler
from virnuc_core.telemetry.tables import DeviceSample, ShardDone

from .measurements import batch, shard


def figures(path: Path) -> dict[str, dict[str, float]]:
    """Return each figure's values by the value of its label, read by Prometheus' own parser."""
    values: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(path.read_text(encoding="utf-8")):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == path.stem
            values.setdefault(sample.name, {})["".join(labels.values())] = sample.value
    return values


def read_gpu(device: str, time_s: float) -> DeviceSample:
    return DeviceSample(time_s, device, 90.0, 1 << 30, None, 61.0)


def sampler() -> Sampler:
    sampler = Sampler(("GPU-a", "GPU-b"), read=read_gpu)
    sampler.sample_once()
    return sampler


def done(device: str, viral: float | None) -> ShardDone:
    return replace(shard(0, [batch(rows=10, device=device)], device=device), viral=viral)


def test_the_figures_are_those_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "night.prom"
    with MetricsFile(path, 100, sampler(), already_done=40) as live:
        live.update(done("GPU-a", 3.0))
        live.update(done("GPU-b", 4.0))
        live.update(done("GPU-b", None))  # of a worker of an older version
        live.update("worker of GPU-b ended (status -9)")
        # Not to `path`: the thread of `live` replaces it when it likes, also with an older text.
        copy = tmp_path / "copy" / path.name
        copy.parent.mkdir()
        copy.write_text(live.text(), encoding="utf-8")
        running = figures(copy)
    assert running["virnuc_state"] == {"running": 1.0, "completed": 0.0, "failed": 0.0}
    assert running["virnuc_sequences"] == {"": 100.0}
    assert running["virnuc_sequences_done"] == {"": 70.0}
    assert running["virnuc_sequences_viral"] == {"": 7.0}
    assert running["virnuc_worker_deaths_total"] == {"": 1.0}
    assert running["virnuc_tokens_total"] == {"GPU-a": 900.0, "GPU-b": 1800.0}
    assert running["virnuc_slots_total"] == {"GPU-a": 1000.0, "GPU-b": 2000.0}
    assert running["virnuc_device_busy_ratio"] == {"GPU-a": 0.9, "GPU-b": 0.9}
    assert "virnuc_device_power_watts" not in running, "it was not read"
    (eta_s,) = running["virnuc_eta_seconds"].values()
    assert 0 < eta_s < 60
    (start_s,), (now_s,) = (
        running[f"virnuc_{name}_time_seconds"].values() for name in ("start", "update")
    )
    assert 1.7e9 < start_s <= now_s
    assert figures(path)["virnuc_state"]["completed"] == 1.0


def test_before_the_first_shard_no_time_left_is_guessed(tmp_path: Path) -> None:
    path = tmp_path / "run.prom"
    with MetricsFile(path, 100, Sampler(("cpu-core-0",))):
        pass
    assert "virnuc_eta_seconds" not in figures(path)


def test_a_run_that_fails_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run.prom"
    with pytest.raises(RuntimeError), MetricsFile(path, 100, sampler()):
        raise RuntimeError
    assert figures(path)["virnuc_state"] == {"running": 0.0, "completed": 0.0, "failed": 1.0}


def test_names_cannot_break_a_line(tmp_path: Path) -> None:
    path = tmp_path / 'a"b\\c.prom'
    with MetricsFile(path, 1, Sampler(("cpu-core-0",))):
        pass
    assert figures(path)["virnuc_sequences"] == {"": 1.0}


def test_a_full_disk_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_text_atomically", refuse)
    monkeypatch.setattr(module, "WRITE_EVERY_S", 0.001)
    with caplog.at_level(logging.WARNING), MetricsFile(tmp_path / "r.prom", 1, sampler()) as live:
        while live._thread.is_alive() and not caplog.messages:
            pass
    assert len(caplog.messages) == 1
    assert "No space left" in caplog.messages[0]


def test_only_a_file_of_ours_is_replaced(tmp_path: Path) -> None:
    require_metrics_file(tmp_path / "new.prom")
    ours = tmp_path / "ours.prom"
    ours.write_text(f"{FIRST_LINE}\n")
    require_metrics_file(ours)
    foreign = tmp_path / "foreign.prom"
    foreign.write_text("node_load1 0.2\n")
    with pytest.raises(ConfigError, match="was not written by virnuc"):
        require_metrics_file(foreign)
    with pytest.raises(ConfigError, match=r"must end in \.prom"):
        require_metrics_file(tmp_path / "reads.tsv")
    link = tmp_path / "link.prom"
    link.symlink_to(foreign)
    with pytest.raises(ConfigError, match="cannot be replaced"):
        require_metrics_file(link)
    (tmp_path / "folder.prom").mkdir()
    with pytest.raises(ConfigError, match="cannot be replaced"):
        require_metrics_file(tmp_path / "folder.prom")
