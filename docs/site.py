"""Generated pages of the documentation: README, commands, columns, Python and the notebook."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FUNCTIONS = (
    "virnuc_core.finished_run.predict",
    "virnuc_core.finished_run.open_run",
    "virnuc_core.finished_run.Run",
    "virnuc_core.inspection.interface.inspect",
    "virnuc_core.telemetry.log.open_frame",
)
MODELS = ("RunSpec", "EngineSpec")  # of virnuc_core.config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site. mkdocs calls this function."""
    from mkdocs.structure.files import File

    pages = {
        "index.md": front(),
        "commands.md": commands(),
        "tables.md": tables(),
        "api.md": api(),
        "notebook.md": notebook(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def front() -> str:
    """Return the README with links that work inside `docs/`.

    Links to other files of the repository become plain words.
    """
    text = (HERE.parent / "README.md").read_text(encoding="utf-8")
    text = text.replace("](docs/notebook.ipynb)", "](notebook.md)")
    text = text.replace("](docs/pictures/", "](pictures/")
    text = re.sub(r"\]\(docs/([\w./-]+\.md)(#[\w-]+)?\)", r"](\1\2)", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:|pictures/|[\w./-]+\.md)[^)]*\)", r"\1", text)


def notebook() -> str:
    """Return the cells of the notebook as a page. A link leads to the file itself."""
    cells = json.loads((HERE / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            source = f"```python\n{source}\n```"
        parts.append(source)
    parts.append("[Download this page as a notebook](notebook.ipynb)")
    return "\n\n".join(parts)


def commands() -> str:
    """Return every command with its options, as the command line itself knows them."""
    from virnuc.flows.cli.app import app

    return str(app.generate_docs()).replace("# virnuc\n", "# Every command\n", 1)


def tables() -> str:
    """Return the columns of each table, from the schema that tests hold the files to."""
    lines = [
        "# Columns of every table\n",
        "Tables are TAB-separated UTF-8 with one header line and no quoting. A JSON Schema",
        "describes the rows of each (`docs/tables.json`). Tests check the files of runs by it.\n",
    ]
    schemas = json.loads((HERE / "tables.json").read_text(encoding="utf-8"))
    for name, schema in schemas.items():
        lines += [f"## `{name}`", "", schema["description"], ""]
        lines += ["| column | type | content |", "| --- | --- | --- |"]
        for column, description in schema["properties"].items():
            lines.append(_row(f"`{column}`", _column_type(description), description["description"]))
        lines.append("")
    return "\n".join(lines)


def _column_type(description: dict[str, Any]) -> str:
    """Return the type of a column in words."""
    types = description.get("type", "string")
    if isinstance(types, list):
        types = " or ".join(types)
    return str(types).replace("null", "empty")


def api() -> str:
    """Return the page on functions for scripts and notebooks, and the fields of their settings."""
    from virnuc_core import config

    lines = ["# Python\n"]
    lines += [f"::: {name}\n" for name in FUNCTIONS]
    for model_name in MODELS:
        model = getattr(config, model_name)
        lines += [f"## `virnuc_core.config.{model_name}`\n", f"{model.__doc__}\n"]
        lines += ["| field | type | default | |", "| --- | --- | --- | --- |"]
        for name, field in model.model_fields.items():
            lines.append(
                _row(
                    f"`{name}`",
                    f"`{_type_name(field.annotation)}`",
                    _default_text(field),
                    field.description or "",
                )
            )
        lines.append("")
    return "\n".join(lines)


def _type_name(annotation: object) -> str:
    """Return a type without the modules that its parts come from."""
    name = re.sub(r"\b(\w+\.)+", "", str(annotation))
    return name.removeprefix("<class '").removesuffix("'>")


def _default_text(field: Any) -> str:
    """Return the default of a field; empty for a required one."""
    from virnuc_core.config import EngineSpec

    if field.is_required():
        return ""
    default = field.get_default()
    if isinstance(default, EngineSpec):
        return "its own"
    return f"`{default}`"


def _row(*cells: str) -> str:
    """Return a row of a Markdown table."""
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"
