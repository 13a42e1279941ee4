"""What a run from a terminal shows while it works: live bars and log lines on one console."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from rich.console import Console

from virnuc_core.errors import printable
from virnuc_core.telemetry import live

# loggers of Prefect that count, at the end, what is still to be sent
QUEUE_LOGGERS: Final = ("APILogWorker", "EventsWorker")
PREFECT_HANDLERS: Final = "prefect.logging.handlers"  # the module
LINE: Final = "%(asctime)s  %(message)s"
CLOCK: Final = "%H:%M:%S"
DEBUG_LINE: Final = "%(asctime)s | %(levelname)-7s | %(name)s - %(message)s"


class TerminalOptions(Protocol):
    """What the user wants to see on the terminal."""

    @property
    def quiet(self) -> bool:
        """Show only warnings and the outcome."""

    @property
    def no_progress(self) -> bool:
        """Show plain lines in place of live bars."""

    @property
    def debug(self) -> bool:
        """Show everything, also what Prefect logs."""


@contextmanager
def shown_log_lines(terminal: TerminalOptions) -> Iterator[None]:
    """Show live bars, the core's log lines and warnings on one console while the block runs.

    If Prefect is loaded, its handler on the root logger writes the lines, and stays as it is set up
    here. Otherwise a handler of ours does, which is removed after the block.

    Args:
        terminal: What is shown.
    """
    # If the server is lost, Prefect's log handler would print an error for each line.
    logging.raiseExceptions = terminal.debug
    console = live.shared_console()
    if terminal.quiet or terminal.no_progress:
        console.is_interactive = False
    root = logging.getLogger()
    handlers = _prefect_console_handlers(root)
    own_handler = None
    if not handlers:
        own_handler = _ConsoleHandler()
        own_handler.setFormatter(_PrintableFormatter(DEBUG_LINE))
        handlers = [own_handler]
        root.addHandler(own_handler)

    level = logging.WARNING if terminal.quiet else logging.INFO

    def is_shown(record: logging.LogRecord) -> bool:
        """Return whether a line is shown: lines of the core, and warnings of other libraries."""
        if record.name.startswith("virnuc_core") and record.levelno >= level:
            return True
        return record.levelno == logging.WARNING and record.name not in QUEUE_LOGGERS

    for handler in handlers:
        handler.console = console
        if not terminal.debug:
            handler.addFilter(is_shown)
            handler.setFormatter(_PrintableFormatter(LINE, CLOCK))
    try:
        yield
    finally:
        if own_handler is not None:
            root.removeHandler(own_handler)


class _ConsoleHandler(logging.Handler):
    """Writes log lines to a console of rich, as Prefect's own handler does.

    Attributes:
        console: Where the lines are written. Live bars on the same console stay below them.
    """

    console: Console

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        try:
            self.console.print(self.format(record), soft_wrap=True)
        except Exception:  # noqa: BLE001 - a line that cannot be written must not end the run
            self.handleError(record)


class _PrintableFormatter(logging.Formatter):
    """Formats lines so that no name in them, as of a file, moves the cursor."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without control characters."""
        return printable(super().format(record))


def _prefect_console_handlers(root: logging.Logger) -> list[_ConsoleHandler]:
    """Return the handlers of Prefect that write to the terminal; none if it is not loaded.

    They have a `console`, as ours has.
    """
    module = sys.modules.get(PREFECT_HANDLERS)
    if module is None:
        return []
    return [item for item in root.handlers if isinstance(item, module.PrefectConsoleHandler)]
