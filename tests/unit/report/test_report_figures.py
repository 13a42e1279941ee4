"""Figures of one name are one number in every form of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.report_figures import Figure, UnknownLabelError, disagreements, figures_of, parse_number
from virnuc_core.profiles import Profile, load_profile
from virnuc_core.report import benchmark, printed
from virnuc_core.report.build import rerender, write_report
from virnuc_core.report.model import TelemetryMetrics
from virnuc_core.report.regression import HISTORY
from virnuc_core.report.views import devices, speed

from .validate_directory import Recipe, build, copy_made_once

pytestmark = pytest.mark.usefixtures("telemetry_once")

RECIPES = {
    "all met": Recipe(),
    "missed": Recipe(utilisation=(60.0, 71.3), packing=0.8949, wait_ms=80.0, baseline_s=90.0),
    "one device": Recipe(devices=1, utilisation=(92.0,)),
    "four devices": Recipe(devices=4, between=(2,), utilisation=(92.0, 95.0, 91.0, 89.96)),
    "baseline on a part": Recipe(baseline_reads=100),
    "processor cores": Recipe(gpu=None),
}


def written(out: Path, recipe: Recipe, profile: Profile | None = None) -> list[Figure]:
    """Return the figures of a validation, as its forms show them."""
    report_on(out, recipe, profile)
    return figures_of(out, {})


def report_on(out: Path, recipe: Recipe, profile: Profile | None = None) -> None:
    """Make `out` a validation with its report."""
    made_from = ("report", recipe, profile and profile.model_dump_json())

    def make(folder: Path) -> None:
        write_report(folder / "out", build(folder / "out", recipe, profile), folder / HISTORY)

    copy_made_once(made_from, make, out.parent)


def written_again(out: Path, recipe: Recipe) -> list[Figure]:
    """Return the figures of a validation whose forms are written again from the report's data."""
    report_on(out, recipe)
    rerender(out)
    return figures_of(out, {})


def places(figures: list[Figure], name: str) -> set[str]:
    """Return the forms that show a figure."""
    return {figure.place.split(":")[0].split("_")[0] for figure in figures if figure.name == name}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_figures_of_one_name_are_one_number(tmp_path: Path, recipe: Recipe) -> None:
    assert disagreements(written(tmp_path / "out", recipe)) == []


def test_every_form_is_read(tmp_path: Path) -> None:
    figures = written(tmp_path / "out", Recipe())
    pages = {"report.md", "report.html", "report.json"}
    for name in ("total time", "tokens per second", "sequences per second", "packing"):
        assert places(figures, name) >= pages, name
    for name in ("peak memory", "scaling efficiency", "mean utilisation"):
        assert places(figures, name) >= pages | {"benchmark"}, name
    for name in ("criterion scaling", "criterion gpu_utilisation", "time of a stage"):
        assert places(figures, name) >= pages | {"report.txt"}, name
    # Twice in report.md and report.html (table and summary), and in four more files
    counts = Counter(figure.subject for figure in figures if figure.name == "peak memory")
    judged = [count for subject, count in counts.items() if subject.startswith("devices-2 ")]
    assert len(judged) == 2
    assert min(judged) >= 8


def test_a_projected_time_is_marked_wherever_it_is_shown(tmp_path: Path) -> None:
    """`figures_of` asserts the mark for each place that shows the value of a criterion."""
    profile = load_profile("phase10-1m").model_copy(
        update={"min_reads": 1, "min_compared_chunks": 1}
    )
    figures = written(tmp_path / "out", Recipe(), profile)
    assert disagreements(figures) == []
    report = (tmp_path / "out" / "report" / "report.txt").read_text()
    assert report.count("(projected)") == 2, "the times on one device and on two"
    assert "[PROJECTED]" in report


def test_a_failure_has_its_reason_in_the_printed_report(tmp_path: Path) -> None:
    written(tmp_path / "out", RECIPES["missed"])
    report = (tmp_path / "out" / "report" / "report.txt").read_text()
    reasons = [line for line in report.splitlines() if "Why not met:" in line]
    assert len(reasons) == report.count("[FAIL]") - report.count("Scaling efficiency"), report
    assert any("GPU utilisation (ESM-2): 60% is not >80%" in line for line in reasons)


# --- The test of the test: somebody adds a second definition ----------------------------------------

Change = Callable[[pytest.MonkeyPatch], None]


def _memory_in_decimal_units(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(printed, "gibibytes", lambda size, unit="": f"{size * 1e-9:.1f} GiB")


def _sequences_over_another_time(patch: pytest.MonkeyPatch) -> None:
    def sentence(telemetry: TelemetryMetrics) -> str:
        return f"Sequences/s: {telemetry.rows_per_s:.1f}, each counted once."

    patch.setattr(devices, "_speed_sentence", sentence)


def _efficiency_of_the_encoder(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(speed, "efficiency_text", lambda figure: f"{100 * figure.protein_scaling:.1f}%")


def _mean_in_place_of_peak(patch: pytest.MonkeyPatch) -> None:
    of = benchmark.DeviceResult.of.__func__  # type: ignore[attr-defined]

    def mean(cls: type, device: object) -> benchmark.DeviceResult:
        result: benchmark.DeviceResult = of(cls, device)
        return result.model_copy(update={"mem_used_peak": (result.mem_used_avg or 0) * 0.9})

    patch.setattr(benchmark.DeviceResult, "of", classmethod(mean))


def _counts_of_all_criteria(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "virnuc_core.report.render.verdict_counts", lambda report: "1 pass · 0 fail · no warnings"
    )


SECOND_DEFINITIONS: dict[str, Change] = {
    "peak memory": _memory_in_decimal_units,
    "sequences per second": _sequences_over_another_time,
    "scaling efficiency": _efficiency_of_the_encoder,
    "peak memory in JSON": _mean_in_place_of_peak,
    "criteria met": _counts_of_all_criteria,
}


@pytest.mark.parametrize("name", SECOND_DEFINITIONS)
def test_a_second_definition_is_found(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    SECOND_DEFINITIONS[name](monkeypatch)
    found = disagreements(written_again(tmp_path / "out", RECIPES["missed"]))
    assert any(sentence.startswith(name.split(" in ", maxsplit=1)[0]) for sentence in found), found


def test_a_figure_under_a_new_label_must_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_lines = printed._summary_line
    monkeypatch.setattr(
        printed,
        "_summary_line",
        lambda title, *rest: known_lines(title.replace("Tokens/sec", "Speed"), *rest),
    )
    with pytest.raises(UnknownLabelError, match="'Speed' has a number and no name"):
        written_again(tmp_path / "out", Recipe())


@pytest.mark.parametrize(
    ("text", "value", "step"),
    [
        ("1:02:03", 3723.0, 2.0),
        ("95.6%", 0.956, 0.001),
        ("12.11 h", 12.11 * 3600, 36.0),
        ("7.81 GiB", 7.81 * 2**30, 0.01 * 2**30),
        ("1,234", 1234.0, 1.0),
        ("2.78e-08", 2.78e-8, 1e-10),
        ("33:45 (projected)", 2025.0, 2.0),
    ],
)
def test_numbers_are_read_with_their_units(text: str, value: float, step: float) -> None:
    parsed = parse_number(text)
    assert parsed is not None
    assert parsed == pytest.approx((value, step))
