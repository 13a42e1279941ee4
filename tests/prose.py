"""Measure how the documentation is written: length of sentences, and how often it says "you".

Headings, tables, code, addresses and lists of links are left out. Run it from the command line for
a table of all pages; a test holds the pages for people to the limits below.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONG_SENTENCE = 30  # words
MAX_MEAN_WORDS = 18.0
MAX_LONG_SHARE = 0.08
MIN_YOU_PER_1000 = 8.0  # of how-to guides and tutorials

SENTENCE_END = re.compile(r"[.!?](?:[\"')*]*)(?:\s+|$)")
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|et al|vs|cf|approx|No)\.")
WORD = re.compile(r"[A-Za-z0-9][\w’'.,/+%-]*")
YOU = re.compile(r"\b(?:you|your|yours)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Prose:
    """The measures of a page."""

    sentences: int
    words: int
    long_sentences: int
    you: int

    @property
    def mean_words(self) -> float:
        """Mean number of words in a sentence."""
        return self.words / max(self.sentences, 1)

    @property
    def long_share(self) -> float:
        """Share of sentences with more than `LONG_SENTENCE` words."""
        return self.long_sentences / max(self.sentences, 1)

    @property
    def you_per_1000(self) -> float:
        """How often the page says "you" or "your" in a thousand words."""
        return 1000 * self.you / max(self.words, 1)


def measure(text: str) -> Prose:
    """Measure the running text of a Markdown page."""
    sentences = list(_sentences(text))
    n_words = [len(WORD.findall(sentence)) for sentence in sentences]
    n_long = sum(count > LONG_SENTENCE for count in n_words)
    n_you = sum(len(YOU.findall(sentence)) for sentence in sentences)
    return Prose(len(sentences), sum(n_words), n_long, n_you)


def _sentences(text: str) -> Iterator[str]:
    """Yield the sentences of the paragraphs and list items of a Markdown page."""
    for paragraph in _paragraphs(text):
        plain = re.sub(r"`[^`]*`", "code", paragraph)  # a piece of code counts as one word
        plain = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", plain)
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        plain = re.sub(r"https?://\S+", "address", plain)
        plain = ABBREVIATIONS.sub(r"\1", plain)
        for sentence in SENTENCE_END.split(plain):
            if len(WORD.findall(sentence)) > 1:
                yield sentence


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a Markdown page, without code, tables and headings."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines: list[str] = []
    in_code = False
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith(("```", "~~~")):
            in_code = not in_code
            stripped = ""
        is_left_out = in_code or not stripped or stripped.startswith(("|", "#", "<", "!["))
        begins_item = bool(re.match(r"(?:[-*+]|\d+\.)\s", stripped))
        if (is_left_out or begins_item) and lines:
            yield " ".join(lines)
            lines = []
        if not is_left_out:
            lines.append(re.sub(r"^(?:[-*+]|\d+\.)\s+", "", stripped))
    if lines:
        yield " ".join(lines)


def main() -> None:
    """Print the measures of pages, or of all pages of the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path)
    pages = parser.parse_args().pages
    if not pages:
        readmes = [ROOT / "README.md", ROOT / "deployments" / "README.md"]
        pages = [*readmes, *sorted((ROOT / "docs").rglob("*.md"))]
    print(f"{'page':50}  words  words a sentence  above {LONG_SENTENCE}  you per 1,000")
    for page in pages:
        prose = measure(page.read_text(encoding="utf-8"))
        print(
            f"{page!s:50.50}  {prose.words:5}  {prose.mean_words:16.1f}"
            f"  {prose.long_share:8.1%}  {prose.you_per_1000:13.1f}"
        )


if __name__ == "__main__":
    main()
