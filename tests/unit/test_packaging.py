"""What an installation holds: every folder of modules is listed in pyproject.toml."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_folder_of_modules_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packaged = set(settings["tool"]["setuptools"]["packages"])
    folders = set()
    source = ROOT / "src"
    for folder, _, files in os.walk(source, followlinks=True):
        if any(name.endswith(".py") for name in files):
            folders.add(".".join(Path(folder).relative_to(source).parts))
    assert folders == packaged
