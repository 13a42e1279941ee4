"""Text from outside in Markdown pages: names of files, samples, devices and machines, and messages.

Such text is shown as it is. It never becomes a link, an image, HTML, a heading or another piece of
Markdown. Three functions do this, for the three places where text can stand: `escape_markdown` for
lines and table cells, `code_span` for text in a line that is shown as code, and `code_block` for
lines that are shown as code. `front_matter_value` is for the facts at the top of a page.
"""

import json
import re
from typing import Final

# A verdict in brackets, as reports have them. It is no link: those need a bracket, a parenthesis or
# a colon after it. Everything else is a word.
_VERDICT_OR_WORD: Final = re.compile(r"(?P<verdict>\[[A-Z][A-Z ]*\](?![\[(:]))|\S+")
# Many programs make a link of a word that looks like an address, without any markup.
_ADDRESS: Final = re.compile(r"//|www\.|mailto:|xmpp:|\w@[\w-]+\.", re.IGNORECASE)
_PUNCTUATION: Final = re.compile(r"[!-/:-@\[-`{-~]")  # all of ASCII
_MARKUP: Final = re.compile(
    r"""
      [\\`*~|<>\[\]$]                   # code, emphasis, tables, HTML, links, formulas
    | (?<![^\W_])_ | _(?![^\W_])        # emphasis, except inside a word such as max_score
    | &(?=\#?\w+;)                      # a character by its name, such as &lt;
    """,
    re.VERBOSE,
)
# What makes a block of a line, if it stands at the beginning.
_HEADING_OR_LIST: Final = re.compile(r"(#{1,6}|[-+])(?=\s|$)")
_NUMBERED_LIST: Final = re.compile(r"^(\d{1,9})([.)])(?=\s|$)")
_RULE: Final = re.compile(r"[-=](?=[-=\s]*$)")
# Markdown in a quoted value of the front matter; quotation marks and backslashes belong to JSON.
_QUOTED_MARKUP: Final = re.compile(r"[`*~|<>\[\]$&']|(?<![^\W_])_|_(?![^\W_])")
_QUOTED_ADDRESS: Final = re.compile(
    r"/(?=/)|(?<=www)\.|(?<=mailto):|(?<=xmpp):|(?<=\w)@(?=[\w-]+\.)", re.IGNORECASE
)


class Markdown(str):
    """Text of our own that is Markdown already. Any other text is escaped before it is shown."""

    __slots__ = ()


def escape_markdown(text: str) -> str:
    r"""Return text on one line that Markdown programs show exactly as `text`.

    It can stand in a paragraph, in a list, or in a cell of a table. Only characters that could mean
    something at their place get a backslash, so that ordinary names stay readable in the file.

    Args:
        text: Any text. Its line breaks and repeated blanks become single blanks.

    >>> escape_markdown("[x](http://a.b) of max_score_0")
    '\\[x\\]\\(http\\:\\/\\/a\\.b\\) of max_score_0'
    """
    line = " ".join(text.split())
    escaped = _VERDICT_OR_WORD.sub(_escape_word, line)
    if _HEADING_OR_LIST.match(escaped) or _RULE.match(escaped):
        return f"\\{escaped}"
    return _NUMBERED_LIST.sub(r"\1\\\2", escaped)


def _escape_word(match: re.Match[str]) -> str:
    """Return a verdict as it is, and any other word with backslashes before its markup.

    A verdict is a word of a report such as `[PASS]`.
    """
    word = match[0]
    if match["verdict"]:
        return word
    if _ADDRESS.search(word):
        # It would become a link without any markup. So all its punctuation is escaped.
        return _PUNCTUATION.sub(r"\\\g<0>", word)
    return _MARKUP.sub(r"\\\g<0>", word)


def code_span(text: str) -> str:
    """Return text as Markdown that is shown as code inside a line. It ends where the text ends.

    Args:
        text: Any text. Its line breaks and repeated blanks become single blanks.
    """
    line = " ".join(text.split()) or " "
    fence = "`" * (_longest_run_of_backticks(line) + 1)
    if line.startswith("`") or line.endswith("`"):
        line = f" {line} "  # without the blanks the backticks would belong to the fence
    return f"{fence}{line}{fence}"


def code_block(text: str) -> str:
    """Return lines of text as Markdown that is shown as a block of code.

    Args:
        text: The lines, each with its line break. Lines of backticks inside do not end the block.
    """
    fence = "`" * max(3, _longest_run_of_backticks(text) + 1)
    return f"{fence}\n{text}{fence}"


def _longest_run_of_backticks(text: str) -> int:
    """Return the number of backticks in the longest sequence of backticks; 0 if there are none."""
    return max((len(run) for run in re.findall("`+", text)), default=0)


def front_matter_value(value: object) -> str:
    """Return a value as JSON, for the facts between the lines `---` at the top of a page.

    Programs that do not know such facts show them as Markdown. So characters that mean something in
    Markdown are written by their numbers, which JSON and YAML read as the same characters.

    Args:
        value: A text, a number, or anything else that JSON can hold.
    """
    quoted = json.dumps(value)
    for pattern in (_QUOTED_MARKUP, _QUOTED_ADDRESS):
        quoted = pattern.sub(_as_number, quoted)
    return quoted


def _as_number(match: re.Match[str]) -> str:
    """Return a character as JSON writes it by its number, such as `\\u005b`."""
    return f"\\u{ord(match[0]):04x}"
