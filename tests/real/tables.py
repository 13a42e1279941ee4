"""Make the tables on real genomes anew: `python -m tests.real.tables WHEELS DATA OUT`.

Each table comes from a module of this folder, which can also be run by itself with the same
arguments. It writes to a folder of its own in OUT; OUT/tables.md then holds all of them. A module
whose table is there already is passed over, so an interrupted command can be started again. It
begins the table anew at which it was interrupted.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .material import argument_parser

# Module, and the file with its table.
TABLES: Final = {
    "kinds": "balancing.md",
    "familiarity": "familiarity.md",
    "heads": "heads.md",
    "thresholds": "thresholds.md",
    "accuracy": "accuracy.md",
}
DONE: Final = "done"  # an empty file beside a table that is complete


def make_tables(wheels: Path, data: Path, out: Path, modules: Sequence[str]) -> Path:
    """Run modules that are not done yet, and join their tables.

    Args:
        wheels: The folder that `make real-data` fills.
        data: The folder with the genomes of other kinds.
        out: The folder to write to.
        modules: Names in `TABLES`.

    Returns:
        The file with all tables.
    """
    out.mkdir(parents=True, exist_ok=True)
    parts = []
    for module in modules:
        folder = out / module
        if not (folder / DONE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            start_s = time.monotonic()
            command: list[str | Path] = [sys.executable, "-m", f"{__package__}.{module}"]
            command += [wheels, data, folder]
            subprocess.run(command, check=True)
            (folder / DONE).touch()
            print(f"{module}: {time.monotonic() - start_s:.0f} s", flush=True)
        table = (folder / TABLES[module]).read_text(encoding="utf-8")
        parts.append(f"# {module}\n\n{table}")
    page = out / "tables.md"
    page.write_text("\n".join(parts), encoding="utf-8")
    return page


def main() -> None:
    """Make the tables that the command line names; all by default."""
    parser = argument_parser()
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES))
    arguments = parser.parse_args()
    page = make_tables(arguments.wheels, arguments.data, arguments.out, arguments.only)
    print(f"Tables: {page}")


if __name__ == "__main__":
    main()
