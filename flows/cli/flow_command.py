"""Makes the command of a flow: its options, how it is run, and what it says of the end."""

import importlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from pydantic import create_model
from pydantic_core import to_jsonable_python

from virnuc.flows.cli import run_from_terminal as terminal
from virnuc.flows.cli.answer_text import answer_lines, warning_lines
from virnuc.flows.cli.options import OnTerminal, command
from virnuc.flows.cli.output import say, show_table
from virnuc.flows.outcome import NOT_MET, REJECTED
from virnuc.flows.page_in_ui import page_in_ui
from virnuc.flows.settings.shared import FlowSettings
from virnuc.tasks.outcome import Outcome
from virnuc_core.answer import Answer
from virnuc_core.command_time import record_waiting, waited_s
from virnuc_core.errors import VirnucError, printable

# exit codes
CRITERION_FAILED: Final = 5
PARTIAL: Final = 6  # some rows had to be set aside
NOT_JUDGED: Final = 7
log = logging.getLogger(__name__)
NOT_IN_UI: Final = "the run is not there, because it went on without a Prefect server"

Settings = TypeVar("Settings", bound=FlowSettings)


@dataclass(frozen=True)
class FlowCommand(Generic[Settings]):
    """Description of a command that runs a flow.

    Attributes:
        function: The plain function with the steps of the flow, as `module:function`. It is
            imported when the command runs, and so is the Prefect flow of the same name.
        settings: The settings of the flow. Each field becomes an option.
        options: Settings that only the command takes; each becomes an option, too. None adds none.
        facts: Function that returns lines for the end of the output, such as the folder of the
            results, by their titles. The titles are also the keys in `--json`.
        text: Function that returns a file whose text is printed at the end. None prints none.
        tables: Function that returns tables to show at the end, from the settings and the result of
            the flow, as `module:function`. It is imported when the command runs. Empty shows none.
        has_page: Print the address of the run in the Prefect UI.
        positional: Names of the settings that may be given without the name of their option.
    """

    function: str
    settings: type[Settings]
    facts: Callable[[Settings], dict[str, str]]
    text: Callable[[Settings], Path] | None = None
    tables: str = ""
    has_page: bool = False
    positional: tuple[str, ...] = ()
    options: type[Any] | None = None


def flow_command(spec: FlowCommand[Settings]) -> Callable[..., int]:
    """Return the command that runs a flow from a terminal and says how it ended.

    The command prints the text of `spec.text`, the tables, the message of the outcome and the
    facts; with `--json` one object that holds all but the text and the tables. Its return value is
    the exit code.
    """

    @command(_options_model(spec), *spec.positional)
    def run(settings: Any) -> int:
        """Run the flow, print how it ended, and return the exit code."""
        outcome = terminal.run_from_terminal(spec.function, spec.settings, settings)
        code = exit_code(outcome)
        facts = spec.facts(settings)
        if spec.has_page:
            facts["In the UI"] = NOT_IN_UI
            if outcome.flow_run_id is not None:
                facts["In the UI"] = page_in_ui(outcome.flow_run_id)
        if not settings.as_json:
            if spec.text is not None:
                say(spec.text(settings).read_text(encoding="utf-8"))
            if spec.tables:
                _show_tables(spec.tables, settings, outcome.value)
        # All work is done now, and what is left to print takes no time.
        elapsed_s = waited_s()
        outcome = _with_waiting(outcome, settings.out, elapsed_s)
        if settings.as_json:
            say(_outcome_as_json(outcome, code, facts))
            return code
        if settings.verbose:
            say(*_stage_lines(outcome.value))
        say(*_closing_lines(outcome))
        for name, fact in facts.items():
            say(f"{name}: {fact}")
        say(f"Time: {elapsed_s:.1f} s")
        answer = getattr(outcome.value, "answer", None)
        if isinstance(answer, Answer):
            say(*warning_lines(answer))
        return code

    return run


def _with_waiting(outcome: Outcome[Any], out: Path, elapsed_s: float) -> Outcome[Any]:
    """Write how long the user waited into the run's summary; return the outcome with this summary.

    Outcomes of other commands than `predict`, and of runs that were complete before, are returned
    as they are. If the time cannot be written, a warning is logged, for the results are complete.

    Args:
        outcome: How the flow ended.
        out: The output directory.
        elapsed_s: The time that the command prints, in seconds.
    """
    from virnuc_core.runfiles import RunSummary  # every flow has imported it by now

    if not isinstance(outcome.value, RunSummary):
        return outcome
    try:
        is_written = record_waiting(out, elapsed_s)
    except (VirnucError, OSError) as error:
        log.warning("summary.json does not get the time of the command: %s", error)
        return outcome
    if not is_written:
        return outcome
    summary = outcome.value.model_copy(update={"waited_s": elapsed_s})
    return replace(outcome, value=summary)


def _stage_lines(result: object) -> list[str]:
    """Return the nine stages of a run with their times; nothing for results without stages."""
    from virnuc_core.runfiles import RunSummary  # every flow has imported it by now
    from virnuc_core.telemetry.live import pipeline_summary
    from virnuc_core.telemetry.tables import StageTime

    if not isinstance(result, RunSummary) or not result.stages:
        return []
    stages = [StageTime(name, seconds) for name, seconds in result.stages.items()]
    total_s = result.total_s or 0.0
    lines = pipeline_summary(stages, total_s).splitlines()
    if result.waited_s is not None and result.waited_s > total_s:
        start_s = result.waited_s - total_s
        lines.append(
            f"Beside the run: {start_s:.1f} s, to start the command and to check its input"
        )
    return [*lines, ""]


def _closing_lines(outcome: Outcome[Any]) -> list[str]:
    """Return how a flow ended: the answer of a prediction, or the message of any other flow."""
    answer = getattr(outcome.value, "answer", None)
    if not isinstance(answer, Answer):
        return [outcome.message]
    lines = answer_lines(answer)
    # What the message says beyond the answer, such as that nothing had to be computed.
    beginning, _, note = outcome.message.partition(answer.message)
    if beginning or note:
        lines[0] = f"{beginning}{lines[0]}"
        note = note.removeprefix("; ")
    if note:
        lines += ["", note]
    return [*lines, ""]


def _show_tables(function: str, settings: Any, result: object) -> None:
    """Print the tables that a function returns; those without rows are not shown.

    Args:
        function: The function, as `module:function`.
        settings: The settings of the flow.
        result: The result of the flow. None if a criterion was missed.
    """
    from virnuc_core.report.text import Mark, cell  # it takes a while to import

    module_name, function_name = function.split(":")
    make_tables = getattr(importlib.import_module(module_name), function_name)
    for table in make_tables(settings, result):
        rows = []
        for row in table.rows:
            texts = [
                value.label if isinstance(value, Mark) else cell(value) for value in row.values()
            ]
            rows.append([printable(text) for text in texts])
        if rows:
            show_table(table.columns, rows, table.title)


def _options_model(spec: FlowCommand[Any]) -> Any:
    """Return the model of all options of a command: its own, the flow's, and the terminal's."""
    model_name = spec.settings.__name__
    bases: tuple[type[Any], ...] = (spec.settings, OnTerminal)
    if spec.options is not None:
        bases = (spec.options, *bases)
    return create_model(model_name, __base__=bases)


def exit_code(outcome: Outcome[Any]) -> int:
    """Return the exit code of a flow that ended so.

    Returns:
        0, or `CRITERION_FAILED`, `PARTIAL` or `NOT_JUDGED`.

    Raises:
        Exception: What the flow raised.
    """
    if outcome.name in (NOT_MET, REJECTED):
        return CRITERION_FAILED
    result = outcome.result()
    if getattr(result, "outcome", "") == "not judged":
        return NOT_JUDGED
    fates = getattr(result, "fates", {})
    if fates.get("failed"):
        return PARTIAL
    return 0


def _outcome_as_json(outcome: Outcome[Any], code: int, facts: dict[str, str]) -> str:
    """Return the outcome of a run for scripts. The fact "In the UI" gets the key `in_the_ui`."""
    data = outcome.value if outcome.error is None else outcome.error
    fields = {
        "state": outcome.name,
        "message": outcome.message,
        "exit_code": code,
        "data": to_jsonable_python(data, fallback=str),
    }
    for name, fact in facts.items():
        key = name.lower().replace(" ", "_")
        fields[key] = fact
    return json.dumps(fields, indent=2)
