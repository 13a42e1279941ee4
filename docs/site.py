"""Pages of the documentation that code or data tell better than a hand: commands, columns, Python, and the README."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FUNCTIONS = ("virnuc_core.pipeline.predict", "virnuc_core.telemetry.log.open_frame")
MODELS = ("RunSpec", "EngineSpec")  # of virnuc_core.config


def on_files(files: Any, config: Any) -> Any:
    """The pages that stand in no file of `docs/`, and pictures of the UI where its test has drawn them."""
    from mkdocs.structure.files import File

    pages = {"index.md": front(), "commands.md": commands(), "tables.md": tables(), "api.md": api()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def front() -> str:
    """The README, its links as seen from within `docs/`; those to other files of the repository become plain words."""
    text = (HERE.parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/([\w.-]+\.md)(#[\w-]+)?\)", r"](\1\2)", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:|[\w.-]+\.md)[^)]*\)", r"\1", text)


def commands() -> str:
    """Every command with its options, as the command line itself knows them."""
    from virnuc.flows.cli.app import app

    return str(app.generate_docs()).replace("# virnuc\n", "# Every command\n", 1)


def tables() -> str:
    """The columns of each table, from the schema that tests hold the files to."""
    lines = [
        "# Columns of every table\n",
        "Tables are TAB-separated UTF-8 with one header line and no quoting. A JSON Schema describes the rows of each",
        "(`docs/tables.json`), and the tests hold what runs write to it.\n",
    ]
    for name, table in json.loads((HERE / "tables.json").read_text(encoding="utf-8")).items():
        lines += [
            f"## `{name}`",
            "",
            table["description"],
            "",
            "| column | type | content |",
            "| --- | --- | --- |",
        ]
        for column, about in table["properties"].items():
            kind = about.get("type", "string")
            kind = " or ".join(kind) if isinstance(kind, list) else kind
            lines.append(
                f"| `{column}` | {kind.replace('null', 'empty')} | {about['description'].replace('|', chr(92) + '|')} |"
            )
        lines.append("")
    return "\n".join(lines)


def api() -> str:
    """What a script or notebook calls, and the fields of what it gives."""
    from virnuc_core import config

    lines = ["# Python\n", *(f"::: {name}\n" for name in FUNCTIONS)]
    for model in (getattr(config, name) for name in MODELS):
        lines += [
            f"## `virnuc_core.config.{model.__name__}`\n",
            f"{model.__doc__}\n",
            "| field | type | default | |",
        ]
        lines.append("| --- | --- | --- | --- |")
        for name, field in model.model_fields.items():
            kind = (
                re.sub(r"\b(\w+\.)+", "", str(field.annotation))
                .removeprefix("<class '")
                .removesuffix("'>")
            )
            default = field.get_default()
            given = (
                "its own"
                if isinstance(default, config.EngineSpec)
                else f"`{default}`" * (not field.is_required())
            )
            cells = (f"`{name}`", f"`{kind}`", given, field.description or "")
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)
