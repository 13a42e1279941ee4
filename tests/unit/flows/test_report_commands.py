"""`virnuc profiles`: the thresholds of a profile."""

from __future__ import annotations

import re

import pytest

from virnuc.flows.cli import main


@pytest.mark.parametrize(
    ("name", "n_devices"),
    [("phase6-scaling", ["2", "4", "8"]), ("phase10-1m", ["4", "8"]), ("ci-smoke", [])],
)
def test_the_thresholds_of_a_profile_are_shown_with_the_bands_that_are_targets(
    capsys: pytest.CaptureFixture[str], name: str, n_devices: list[str]
) -> None:
    assert main(["profiles", name]) == 0
    assert re.findall(r"scaling on (\d) devices", capsys.readouterr().out) == n_devices
