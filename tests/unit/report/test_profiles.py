"""The profiles that come with virnuc: their thresholds are the ones agreed on, and a typing error is no default."""

from __future__ import annotations

from pathlib import Path

import pytest

from virnuc_core.errors import ConfigError
from virnuc_core.profiles import Profile, load_profile, profile_names


def test_the_shipped_profiles() -> None:
    assert profile_names() == [
        "ci-smoke",
        "h200-1m",
        "phase10-1m",
        "phase6-scaling",
        "phase6-stages",
        "production-6m",
    ]


@pytest.mark.parametrize("name", profile_names())
def test_each_is_named_as_its_file(name: str) -> None:
    assert load_profile(name).name == name


def line(profile: Profile, field: str) -> tuple[str, float] | None:
    target = profile.targets.get(field)
    return None if target is None else (target.op, target.value)


def test_phase10_is_strict() -> None:
    profile = load_profile("phase10-1m")
    assert line(profile, "one_device_seconds") == ("<", 3600)
    assert line(profile, "two_device_seconds") == ("<", 1800)
    assert line(profile, "scaling") == (">=", 1.9)
    assert line(profile, "speedup") == (">=", 4.0)
    assert line(profile, "consensus_agreement") == (">=", 99)
    assert line(profile, "gpu_utilisation") == (">", 80)
    assert line(profile, "packing_efficiency") == (">", 90)
    assert profile.time_limit_s == 3600
    assert profile.device_names == ("RTX 4090",)
    assert (profile.baseline.recorded_seconds, profile.baseline.recorded_devices) == (12_600, 2)


def test_production_is_ten_hours_for_six_million() -> None:
    profile = load_profile("production-6m")
    assert profile.target_reads == profile.projection_reads == 6_000_000
    assert line(profile, "two_device_seconds") == ("<", 36_000)
    assert line(profile, "gpu_utilisation") == (">=", 70)
    assert line(profile, "packing_efficiency") == (">=", 90)
    assert line(profile, "starved_share") == ("<", 10)
    assert line(profile, "checkpoint_overhead") == ("<=", 10)
    assert line(profile, "device_time_spread") == ("<=", 10)


def test_phase6_bands() -> None:
    assert load_profile("phase6-scaling").scaling_bands == {
        "2": (1.6, 2.0),
        "4": (3.0, 4.0),
        "8": (6.0, 8.0),
    }
    assert load_profile("phase6-stages").sample_s == 0.5


def test_the_smoke_profile_asks_for_agreement_only() -> None:
    assert list(load_profile("ci-smoke").targets) == ["consensus_agreement"]


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\ntitle = "Mine"\n[targets]\nspeedup = { op = ">=", value = 2.0 }\n',
        encoding="utf-8",
    )
    assert line(load_profile(str(path)), "speedup") == (">=", 2.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name = "x"\ntitle = "x"\n[targets]\nspeed_up = 3\n', r"targets\.speed_up"),
        (
            'name = "x"\ntitle = "x"\n[targets]\nspeedup = { op = "=>", value = 2.0 }\n',
            r"targets\.speedup\.op",
        ),
        ('name = "x"\n', "title"),
        *(
            (f'name = "x"\ntitle = "x"\n{line}\n', f"profile .*mine.toml: {words}")
            for line, words in (
                (
                    'targets.scaling = { op = ">=", value = nan }',
                    r"targets\.scaling\.value: .* finite number",
                ),
                (
                    'targets.scaling = { op = ">=", value = "fast" }',
                    r"targets\.scaling\.value: .* valid number",
                ),
                ("targets = 3", "targets: "),
                ('min_reads = "many"', "min_reads: .* integer"),
                ("time_limit_s = inf", "time_limit_s: .* finite number"),
                ('device_names = "H200"', "device_names: "),
                ("regression_percent = -10", "regression_percent: .* greater than 0"),
                ("scaling_bands.two = [1.8, 2.0]", r"scaling_bands\.two"),
                ("scaling_bands.2 = [1.8]", r"scaling_bands\.2"),
            )
        ),
        ("name = ", "not valid TOML"),
    ],
)
def test_a_typing_error_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words) as raised_error:
        load_profile(str(path))
    assert "\n" not in str(raised_error.value)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="ci-smoke"):
        load_profile("rtx9090")
