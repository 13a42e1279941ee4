"""The commands of flows: which flow each runs, and what it says at the end."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.flows import Flow
from prefect.settings import PREFECT_UI_URL, temporary_settings

from virnuc.flows.cli import main
from virnuc.flows.cli.registry import COMMANDS
from virnuc.flows.cli.run_from_terminal import prefect_flow_path
from virnuc.tasks.outcome import Outcome
from virnuc_core.report.sections import Table

READS = ("reads.fa",)
INBOX = ("--inbox", "inbox")
TRUTH = (*READS, "--truth", "truth.tsv")
OUT = Path("out")
FLOW_RUN = UUID("3b2f8ad4-4c5f-4f0e-9a51-0d0b6f1f0a11")
REPORT = OUT / "report"
# the commands that show tables at the end, and the functions that make these
TABLES = {
    "scale": "scaling_tables",
    "tune": "sweep_tables",
    "profile": "profile_tables",
    "overhead": "overhead_tables",
}
# the name of the command, what it must be given besides --out and --models, and its last lines
COMMANDS_OF_FLOWS = [
    ("predict", READS, ["Results: out", "Page: out/summary.html"]),
    ("predict-inbox", INBOX, ["Fates: out/inbox.tsv"]),
    ("scale", READS, ["Report: out/report/report.html"]),
    ("tune", READS, ["Use it: --settings out/settings.toml", "All figures: out/tune.json"]),
    ("profile", READS, ["Tables: out/telemetry/traces/profile.md"]),
    ("train", TRUTH, ["Head: out/head", "Figures: out/train.html"]),
    ("overhead", (), ["All figures: out/checkpoint_overhead.json"]),
    (
        "validate",
        READS,
        [
            "Report: out/report/report.html",
            f"In the UI: http://ui.example/runs/flow-run/{FLOW_RUN}",
        ],
    ),
]
Started = list[tuple[str, Any]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    """The flows and settings that commands start. Nothing runs: each flow ends at once."""
    calls: Started = []

    def run_from_terminal(function_path: str, _model: type[Any], settings: Any) -> Outcome[str]:
        calls.append((function_path, settings))
        return Outcome("its result", "its message", flow_run_id=FLOW_RUN)

    def make_tables(settings: Any, result: str) -> list[Table]:
        return [Table([{"out": str(settings.out), "result": result}], "A table")]

    monkeypatch.setattr("virnuc.flows.cli.run_from_terminal.run_from_terminal", run_from_terminal)
    for function in TABLES.values():
        monkeypatch.setattr(f"virnuc.flows.cli.flow_tables.{function}", make_tables)
    monkeypatch.chdir(tmp_path)
    return calls


@pytest.fixture
def say_text(tmp_path: Path) -> Callable[[Path], None]:
    """Writes the file whose text a command prints."""

    def write(path: Path) -> None:
        path = tmp_path / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"the text of {path.name}")

    return write


def imported(path: str) -> Any:
    """Return what is at a place, given as `package.module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def test_every_command_of_the_registry_is_found() -> None:
    for entry in COMMANDS:
        assert callable(imported(entry.import_path))


@pytest.mark.parametrize(("name", "words", "facts"), COMMANDS_OF_FLOWS)
def test_a_command_starts_its_flow_with_all_of_its_parameters_and_says_where_the_results_are(
    name: str,
    words: tuple[str, ...],
    facts: list[str],
    started: Started,
    say_text: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    say_text(REPORT / "report.txt")
    with temporary_settings({PREFECT_UI_URL: "http://ui.example"}):
        assert main([name, *words, "--out", "out", "--models", "models"]) == 0
    [(function_path, settings)] = started
    steps = imported(function_path)
    assert not isinstance(steps, Flow)
    assert steps.__name__ == name.replace("-", "_")
    flow = imported(prefect_flow_path(function_path))
    assert isinstance(flow, Flow)
    assert flow.name == name
    assert set(inspect.signature(flow).parameters) <= set(type(settings).model_fields)
    text_of = {"validate": ["the text of report.txt"]}
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert re.fullmatch(r"Time: \d+\.\d s", lines.pop())
    if name in TABLES:
        assert re.search(r"A table.* out .* result .* out .* its result ", output, re.DOTALL)
        lines = lines[-1 - len(facts) :]
    assert lines == [*text_of.get(name, []), "its message", *facts]


def test_a_script_gets_the_facts_by_their_names_and_no_text(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tune", *READS, "--out", "out", "--models", "models", "--json"]
    assert main(words) == 0
    assert len(started) == 1
    assert json.loads(capsys.readouterr().out) == {
        "state": "Completed",
        "message": "its message",
        "exit_code": 0,
        "data": "its result",
        "use_it": "--settings out/settings.toml",
        "all_figures": "out/tune.json",
    }
