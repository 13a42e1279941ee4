"""docs/architecture.md is true: every file and folder that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PATH = re.compile(r"`((?:[\w*]+/)*[\w*]+(?:/|\.(?:py|toml|yaml|json|md)))`")
# Files that runs write, which are in no folder of the source.
WRITTEN_BY_RUNS = {"report.json", "shards/plan.json", "orfs.h5"}


def named_paths() -> list[str]:
    return sorted(set(PATH.findall(PAGE)) - WRITTEN_BY_RUNS)


def test_the_page_names_files() -> None:
    assert len(named_paths()) > 50


def test_every_named_file_exists() -> None:
    missing = []
    for name in named_paths():
        folders = (ROOT, ROOT / "virnuc_core", ROOT / "docs")
        if not any(list(folder.glob(name.rstrip("/"))) for folder in folders):
            missing.append(name)
    assert missing == []


def test_every_flow_has_a_module_of_its_name() -> None:
    row = next(line for line in PAGE.splitlines() if line.startswith("| `flows/` |"))
    flows = re.findall(r"`(\w+)`", row.rpartition("flow:")[2])
    assert len(flows) == 9
    for name in flows:
        assert (ROOT / "flows" / f"{name}.py").is_file()
