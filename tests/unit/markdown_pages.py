"""Pages of Markdown and HTML as programs show them: their structure, and the texts of their parts."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Final

from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

# HTML is enabled, so that a tag in a name would become a token of its own.
PARSER: Final = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
# Texts that Markdown programs could take for something else, each of another kind.
HOSTILE_TEXTS: Final = (
    "[x](http://evil.example)",
    "![x](http://evil.example/a.png)",
    "[x][y]",
    "[x]: http://evil.example",
    "<http://evil.example>",
    "http://evil.example/a_b_",
    "www.evil.example",
    "mail@evil.example",
    "<img src=x onerror=alert(1)>",
    "<!-- gone",
    "&lt;b&gt; &#42;",
    "# heading",
    "heading\n===",
    "---",
    "- item",
    "1. item",
    "1) item",
    "> quotation",
    "**bold** _italic_ *x* __y__ ~~z~~",
    "```\n# out",
    "`code`",
    "~~~",
    "a | b",
    "| --- |",
    "\\",
    "\\[x\\](y)",
    "\\| \\` \\",
    "]",
    "[",
    "[ ] task",
    "    indented",
    "$x$",
)
PIECES: Final = (*"[]()<>!`*_~#+-=|\\&;:/.@$ \n1ax", "http://", "www.", "```", "~~~", "<b>", "&lt;")
names: Final = st.one_of(
    st.sampled_from(HOSTILE_TEXTS),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.text(max_size=20),
)


def structure(page: str) -> list[str]:
    """Return the types of a page's tokens in their order, blocks and what stands inside lines."""
    kinds = []
    for token in PARSER.parse(page):
        kinds.append(token.type)
        for child in token.children or []:
            kinds.append(f"{token.type}.{child.type}")
    return kinds


def shown_texts(page: str) -> list[str]:
    """Return the text of each paragraph, table cell, heading and block of code, without markup."""
    return [_text(token) for token in PARSER.parse(page) if token.type in ("inline", "fence")]


def _text(token: Token) -> str:
    """Return the text of a token, as a browser would show it."""
    if token.children is None:
        return token.content
    return "".join(child.content for child in token.children)


class HtmlPage(HTMLParser):
    """The tags of an HTML page with the names of their attributes, and its texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
