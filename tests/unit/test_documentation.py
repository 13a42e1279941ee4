"""The documentation: readable sentences, a licence for each package, and who is to be cited."""

from __future__ import annotations

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
