"""The documentation: readable sentences, a licence for each package, and who is to be cited."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.licences import PAGE, listed_licences, pinned_versions, stated_licence
from tests.prose import (
    LONG_SENTENCE,
    MAX_LONG_SHARE,
    MAX_MEAN_WORDS,
    MIN_YOU_PER_1000,
    measure,
)

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
TUTORIALS = [ROOT / "docs" / "first-hour.md"]
# Pages that were rewritten. A page joins the list with its rewriting, and never leaves it.
PLAIN_PAGES = [
    ROOT / "README.md",
    ROOT / "deployments" / "README.md",
    ROOT / "docs" / "architecture.md",
    ROOT / "docs" / "cluster.md",
    ROOT / "docs" / "encoders.md",
    ROOT / "docs" / "licences.md",
    ROOT / "docs" / "operations.md",
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "reads.md",
    ROOT / "docs" / "report.md",
    ROOT / "docs" / "results.md",
    ROOT / "docs" / "training.md",
    ROOT / "docs" / "ui.md",
    *TUTORIALS,
    *GUIDES,
]


# Rows of "What can go wrong" tables that quote other programs.
MESSAGES_OF_OTHERS = {
    "could not select device driver",  # Docker
    "nothing provides …",  # conda
    "pip check",
    "requires a different Python",  # pip
    'unknown command "/bin/bash"',  # Docker
    "virnuc: command not found",  # bash
    "--software-deployment-method conda",
}
# Folders whose files can give advice to a user.
ADVICE_FOLDERS = ("deployments", "docs", "flows", "tasks", "virnuc_core")
TEXT_SUFFIXES = {".ipynb", ".j2", ".md", ".py", ".sbatch", ".sh", ".toml", ".yaml", ".yml"}
MAX_PLACEHOLDER = 60  # letters of the source in place of a "…"


def page_name(path: Path) -> str:
    """Return the path of a page within the project."""
    return str(path.relative_to(ROOT))


def test_sentences_are_counted_as_a_reader_counts_them() -> None:
    text = (
        "# A heading is left out\n\nYou run `virnuc predict`. It takes\ntwo seconds, e.g. here.\n\n"
        "- Your item is one sentence\n- and so is this one\n\n```\ncode is left out\n```\n\n"
        "| a table | too |\n"
    )
    prose = measure(text)
    assert prose.sentences == 4
    assert prose.words == 3 + 6 + 5 + 5
    assert prose.you == 2
    long_text = "word " * (LONG_SENTENCE + 1) + "end."
    assert measure(long_text).long_share == 1


@pytest.mark.parametrize("path", PLAIN_PAGES, ids=page_name)
def test_a_page_has_short_sentences(path: Path) -> None:
    prose = measure(path.read_text(encoding="utf-8"))
    assert prose.sentences >= 5
    assert prose.mean_words < MAX_MEAN_WORDS
    assert prose.long_share < MAX_LONG_SHARE


@pytest.mark.parametrize("path", [*TUTORIALS, *GUIDES], ids=page_name)
def test_a_guide_speaks_to_the_reader(path: Path) -> None:
    assert measure(path.read_text(encoding="utf-8")).you_per_1000 >= MIN_YOU_PER_1000


def anchors_of(path: Path) -> set[str]:
    """Return the anchors of a page's headings, by GitHub's and mkdocs' common rule."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    anchors = set()
    for heading in re.findall(r"^#{1,6} +(.+)$", text, re.M):
        words = re.sub(r"[^\w\s-]", "", heading.lower()).split()
        anchors.add("-".join(words))
    return anchors


@pytest.mark.parametrize("path", PLAIN_PAGES, ids=page_name)
def test_a_link_to_a_heading_finds_it(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", path.read_text(encoding="utf-8"))
    for page, anchor in links:
        target = (path.parent / page).resolve() if page else path
        assert anchor in anchors_of(target), f"{page}#{anchor}"


def test_every_package_of_an_installation_has_its_licence_listed() -> None:
    listed = listed_licences(PAGE.read_text(encoding="utf-8"))
    versions = pinned_versions()
    assert list(listed) == list(versions)
    stated = {name: stated_licence(name, version) for name, version in versions.items()}
    installed = {name: licence for name, licence in stated.items() if licence is not None}
    assert len(installed) > 100
    assert {name: listed[name] for name in installed} == installed


def test_the_citation_names_this_version_and_all_three_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    titles = " ".join(reference["title"] for reference in citation["references"])
    for name in ("VirNucPro", "DNABERT-S", "protein"):
        assert name in titles
    assert all(reference.get("doi") or reference.get("url") for reference in citation["references"])


def advice_files() -> list[Path]:
    """Return the files whose text a user can read as advice: documentation, code, deployments."""
    files = [ROOT / "README.md"]
    for folder in ADVICE_FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in TEXT_SUFFIXES]
    return files


def test_nobody_is_told_to_install_our_name_from_a_package_index() -> None:
    # No release is on PyPI: whoever owns the name there could be a stranger.
    told = re.compile(r"virnuc\[\w+\]|pip install '?virnuc\b(?!-)")
    files = advice_files()
    assert len(files) > 200
    wrong = {page_name(path): told.findall(path.read_text(encoding="utf-8")) for path in files}
    assert {name: found for name, found in wrong.items() if found} == {}


def quoted_messages(page: Path) -> list[str]:
    """Return the messages in the first column of the page's tables of what can go wrong."""
    messages = []
    in_table = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if re.match(r"\| you (read|see) \|", line):
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        elif in_table:
            first_cell = line.split(" | ")[0]
            quotes = re.findall(r"`([^`]+)`", first_cell)
            messages += [quote for quote in quotes if " " in quote]
    return messages


@pytest.fixture(scope="module")
def source_text() -> str:
    """The text of all code, with the string literals of several lines joined."""
    files = [path for path in advice_files() if path.suffix != ".md"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return re.sub(r"\"\s*\n\s*f?\"", "", text)


def test_every_message_that_a_page_quotes_is_one_of_ours(source_text: str) -> None:
    pages = [*TUTORIALS, *GUIDES]
    messages = {message for page in pages for message in quoted_messages(page)}
    assert len(messages) > 15
    unknown = []
    for message in sorted(messages - MESSAGES_OF_OTHERS):
        literals = [re.escape(part.strip()) for part in re.split(r"…|\d+", message) if part.strip()]
        pattern = rf".{{0,{MAX_PLACEHOLDER}}}".join(literals)
        if not re.search(pattern, source_text, re.IGNORECASE):
            unknown.append(message)
    assert unknown == []
