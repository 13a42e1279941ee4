"""Questions about files that our functions ask the system, for a child process in which the system
refuses to answer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from virnuc.flows.cli.report_commands import history
from virnuc.flows.output_folder import nearest_existing
from virnuc.flows.settings.measured import keep_newest
from virnuc_core import system_errors
from virnuc_core.allowed_paths import ROOTS, _links_within, require_allowed
from virnuc_core.encoders.checkpoint import open_folder, part_folder, shape_of
from virnuc_core.encoders.convert import init_random, open_public
from virnuc_core.encoders.kept_heads import kept_heads, use_head
from virnuc_core.encoders.model_config import HeadShape
from virnuc_core.engine.node import Node
from virnuc_core.engine.remote_node import _files_of_models
from virnuc_core.inbox import Ledger
from virnuc_core.reads import alignments
from virnuc_core.reads.alignments import _may_be_opened
from virnuc_core.reads.sample_sheet import _resolve
from virnuc_core.reads.sources import find_inputs
from virnuc_core.report.build import approval_state
from virnuc_core.report.raw_files import RawFolder, run_names
from virnuc_core.report.result_tables import result_files
from virnuc_core.report.verify_store import _why_not_staged_again
from virnuc_core.rundir import (
    RunDir,
    _refuse_reads_in_output,
    discard,
    require_absent,
    require_own_directory,
)
from virnuc_core.telemetry.log import latest, open_frame
from virnuc_core.tools.rescore import _require_own_directory
from virnuc_core.validation import ValidationRecord

NO_PAUSES_S = (0.0, 0.0)  # between attempts to ask


class UnusedNode(Node):
    """A node that has started nothing, so that nothing has to be ended."""

    def __init__(self) -> None:
        """Do nothing."""

    def __del__(self) -> None:
        """Do nothing."""


def raw_problems(folder: Path) -> str:
    """Return what the reader of raw files tells of a run whose files it cannot look at."""
    raw = RawFolder(folder.parent)
    raw.telemetry(folder.name, None)
    raw.telemetry(folder.name, "telemetry_1.h5")
    return "; ".join(raw.problems.values())


def why_not_staged_again(reads: Path) -> str:
    """Return why the reads that a record names cannot be staged again."""
    record = SimpleNamespace(staging=SimpleNamespace(files=(str(reads),)))
    return _why_not_staged_again(cast(ValidationRecord, record))


def lists(folder: Path) -> dict[str, Callable[[], object]]:
    """Return calls that list folders, by name."""
    return {
        "kept heads": lambda: kept_heads(folder),
        "a kept head": lambda: use_head(folder, 1),
        "runs of a validation": lambda: run_names(folder),
        "telemetry": lambda: latest(folder),
        "inbox": lambda: Ledger(folder, folder.parent / "out").scan(settle_s=0),
        "output directory": lambda: require_own_directory(folder),
        "links": lambda: list(_links_within(folder, is_recursive=True)),
        "nights": lambda: keep_newest(folder / "2026-01-01T0000", 1),
        "reads": lambda: find_inputs((str(folder),)),
        "raw files": lambda: raw_problems(folder),
        "state of models": lambda: shape_of(folder, HeadShape),
        "models for a node": lambda: _files_of_models(folder),
        "what is discarded": lambda: discard(folder, "report/*"),
    }


def looks(folder: Path) -> dict[str, Callable[[], object]]:
    """Return calls that ask whether something exists, and what it is, by name."""
    name = "reads.fasta"
    return {
        "models directory": lambda: part_folder(folder, "head"),
        "checkpoint": lambda: open_folder(folder, HeadShape),
        "public checkpoint": lambda: open_public(folder),
        "new models": lambda: init_random(folder),
        "copy of models": lambda: UnusedNode()._place_of_copy(folder, "{}"),
        "result files": lambda: result_files(folder),
        "rescored": lambda: _require_own_directory(RunDir(folder.parent), RunDir(folder)),
        "telemetry": lambda: open_frame(folder),
        "sheet": lambda: _resolve(folder / "sheet.tsv", name),
        "reference": lambda: _may_be_opened(folder / name),
        "output folder": lambda: nearest_existing(folder),
        "files to write": lambda: require_absent(folder / name, force=False),
        "reads": lambda: find_inputs((str(folder / name),)),
        "approval": lambda: approval_state(RawFolder(folder), None),
        "raw files": lambda: raw_problems(folder),
        "inbox": lambda: Ledger(folder, folder.parent / "out"),
        "what is discarded": lambda: discard(folder.parent, "unreadable/*"),
        "reads in the output": lambda: _refuse_reads_in_output(folder.parent, [str(folder / name)]),
        "allowed path": lambda: require_allowed(folder / name, "reads"),
        "reads of a record": lambda: why_not_staged_again(folder / name),
        "history": lambda: history(folder / "virnuc-history.jsonl"),
    }


def ask_in_child() -> None:
    """Ask all questions of a kind, and print, as JSON, how each attempt ends.

    Arguments: "lists" or "looks", and the folder for which the calls of the system fail.
    """
    system_errors.RETRY_PAUSES_S = NO_PAUSES_S
    os.environ[ROOTS] = os.sep  # every path is allowed, but it must be known where it leads
    kind, folder = sys.argv[1:]
    results = {}
    for name, attempt in {"lists": lists, "looks": looks}[kind](Path(folder)).items():
        try:
            results[name] = f"returned {attempt()!r}"
        except Exception as error:  # noqa: BLE001 - every error is a result
            results[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(results))


def scan_inbox_in_child() -> None:
    """Print the row of each file of an inbox. Arguments: the inbox, and the output directory."""
    inbox, out = map(Path, sys.argv[1:])
    for row in Ledger(inbox, out).scan(settle_s=-1):
        print(row.file, row.fate, row.note, sep="|")


def read_pairs_in_child() -> None:
    """Look at a BAM file whose disk fails after the first look, and print what is found.

    Arguments: the file; a file during whose life calls fail; and "recovers" if the disk does so
    before the file is read to its end.
    """
    system_errors.RETRY_PAUSES_S = NO_PAUSES_S
    bam, while_file, way = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    look = alignments.require_readable
    read_to_end = alignments._read_to_end

    def look_then_fail(path: str) -> None:
        """Look at the file, and let its disk fail."""
        look(path)
        while_file.touch()

    def recover_then_read(path: str) -> None:
        """Let the disk recover, if it shall, and read."""
        if way == "recovers":
            while_file.unlink()
        read_to_end(path)

    vars(alignments).update(require_readable=look_then_fail, _read_to_end=recover_then_read)
    try:
        mates_follow = alignments.mates_follow(bam, "BAM")
        print(mates_follow, alignments.find_samples(bam, "BAM", "none", 0))
    except Exception as error:  # noqa: BLE001 - every error is a result
        print(f"{type(error).__name__}: {error}")
