"""Write the table of licences in `docs/licences.md` anew (`make licences`).

The packages are those of a production machine (`deployments/requirements.txt`). Their licences are
what the installed packages say of themselves. A package that is not installed here, such as
NVIDIA's libraries on a machine without a GPU, keeps the line that the page already has.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "licences.md"
REQUIREMENTS = ROOT / "deployments" / "requirements.txt"
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)
ROW = re.compile(r"^\| `([^`]+)` \| (.+) \|$", re.MULTILINE)
HEADER = "| package | licence |\n| --- | --- |\n"
MAX_NAME = 40  # letters; a longer text is the licence itself, not its name


def pinned_versions() -> dict[str, str]:
    """Return the version of each package of a production machine, sorted by name."""
    pins = PINNED.findall(REQUIREMENTS.read_text(encoding="utf-8"))
    return dict(sorted(pins, key=lambda pin: pin[0].lower()))


def stated_licence(name: str, version: str) -> str | None:
    """Return the licence that a package states; None if this version of it is not installed.

    The SPDX expression comes first, then the short form of the old field, then the classifiers.
    """
    try:
        fields = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    if metadata.version(name).partition("+")[0] != version:
        return None
    expression = fields.get("License-Expression")
    if expression:
        return expression
    old_field = (fields.get("License") or "").strip()
    is_name = 0 < len(old_field) <= MAX_NAME and "\n" not in old_field
    if is_name:
        return old_field
    classifiers = fields.get_all("Classifier") or []
    names = [line.split(" :: ")[-1] for line in classifiers if line.startswith("License ::")]
    return ", ".join(names) or "not stated"


def listed_licences(page: str) -> dict[str, str]:
    """Return the licence of each package in the table of the page."""
    return dict(ROW.findall(page))


def table(page: str) -> str:
    """Return the rows of all packages, with what the page says of those not installed here."""
    listed = listed_licences(page)
    rows = []
    for name, version in pinned_versions().items():
        licence = stated_licence(name, version) or listed.get(name)
        if licence is None:
            sys.exit(f"{name} is not installed, and {PAGE} has no line for it: write one")
        rows.append(f"| `{name}` | {licence} |\n")
    return "".join(rows)


def main() -> None:
    """Replace the table at the end of the page."""
    page = PAGE.read_text(encoding="utf-8")
    text, header, _ = page.partition(HEADER)
    PAGE.write_text(text + header + table(page), encoding="utf-8")


if __name__ == "__main__":
    main()
