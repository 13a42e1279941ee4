"""Tells from where Prefect gets its settings, so that two processes can be compared.

Prefect reads its settings when it is imported: from the environment, from files in the working
directory, and from the user's profiles. Little is imported here, and not Prefect, because every
`virnuc predict` that finds a server imports this module first.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from virnuc.flows.cli.prefect_settings import PREFECT_DEFAULTS

SETTINGS: Final = "setting of Prefect"  # the name of the fact
# Beginnings of the names of variables that Prefect and its packages read when they are imported.
# Prefect reads its own in any case.
VARIABLES: Final = (
    *("PREFECT", "DO_NOT_TRACK", "OTEL_", "PROMETHEUS_", "WEBSOCKETS_", "COOLNAME_", "FSSPEC_"),
    *("PENDULUM_", "BEARTYPE_", "GRIFFE_", "DISABLE_SQLALCHEMY_", "PY_KEY_VALUE_", "SSL"),
)
# Files in the working directory in which Prefect looks for settings. Other programs use the first
# two as well. All names of Prefect's settings there, and the name of its table, have this word.
ENVIRONMENT_FILE: Final = ".env"
PROJECT_FILE: Final = "pyproject.toml"
PREFECT_FILE: Final = "prefect.toml"
WORD: Final = b"prefect"
PROFILES: Final = "profiles.toml"


def prefect_facts(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what two processes must have in common for Prefect to have the same settings in both.

    Args:
        environment: The environment variables of this process. What `prepare_prefect` adds to them
            may be missing.

    Returns:
        A digest, because some settings are secret, by the name that the server reports.
    """
    variables = {**PREFECT_DEFAULTS, **environment}
    sources = {}
    for name, value in variables.items():
        if name.upper().startswith(VARIABLES):
            sources[name] = value
    for name in (ENVIRONMENT_FILE, PROJECT_FILE, PREFECT_FILE):
        sources[name] = _settings_in_file(name)
    home = os.path.expanduser(variables.get("PREFECT_HOME") or "~/.prefect")  # noqa: PTH111 - raises no error
    profiles = Path(variables.get("PREFECT_PROFILES_PATH") or f"{home}/{PROFILES}")
    sources["profiles"] = f"{_full_name(profiles)} {_content(profiles)!r}"
    text = json.dumps(sources, sort_keys=True)
    return {SETTINGS: hashlib.sha256(text.encode()).hexdigest()}


def _settings_in_file(name: str) -> str:
    """Return what a file in the working directory may set for Prefect; an empty text for nothing.

    Args:
        name: The name of the file, one of those above.
    """
    content = _content(Path(name))
    if WORD not in content.lower() and name != PREFECT_FILE:
        return ""
    if name == PROJECT_FILE:
        return _table_of_prefect(content)
    return content.decode(errors="backslashreplace")


def _table_of_prefect(project: bytes) -> str:
    """Return Prefect's table in a `pyproject.toml`; an empty text if it has none.

    Args:
        project: The content of the file. If it cannot be parsed, the whole of it is returned.
    """
    import tomllib  # few working directories have such a file

    try:
        table = tomllib.loads(project.decode()).get("tool", {}).get("prefect")
    except (ValueError, AttributeError):
        return repr(project)
    return "" if table is None else repr(table)


def _full_name(path: Path) -> str:
    """Return the absolute name of a file; its name as it is if the working directory is gone."""
    with suppress(FileNotFoundError):
        return str(path.absolute())
    return str(path)


def _content(path: Path) -> bytes:
    """Return the content of a file; nothing if it cannot be read, as Prefect takes it."""
    try:
        return path.read_bytes() if path.is_file() else b""
    except OSError:
        return b""
