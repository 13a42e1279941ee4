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
    profiles = _profiles_file(variables)
    sources["file with the profiles"] = _full_name(profiles)
    sources["profiles"] = _text_of(_content(profiles))
    text = json.dumps(sources, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {SETTINGS: digest}


def _profiles_file(variables: Mapping[str, str]) -> Path:
    """Return the file in which Prefect looks for profiles. It may be missing.

    Args:
        variables: The environment variables.
    """
    named_file = variables.get("PREFECT_PROFILES_PATH")
    if named_file:
        return Path(named_file)
    home = variables.get("PREFECT_HOME") or "~/.prefect"
    # `Path.expanduser` raises an error if the user has no home.
    return Path(os.path.expanduser(home)) / PROFILES  # noqa: PTH111


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
    return _text_of(content)


def _table_of_prefect(project: bytes) -> str:
    """Return Prefect's table in a `pyproject.toml`; an empty text if it has none.

    Args:
        project: The content of the file. If it cannot be parsed, the whole of it is returned.
    """
    import tomllib  # few working directories have such a file

    try:
        table = tomllib.loads(project.decode()).get("tool", {}).get("prefect")
    except (ValueError, AttributeError):
        return _text_of(project)
    return "" if table is None else repr(table)


def _text_of(content: bytes) -> str:
    """Return the content of a file as text, in which different contents remain different."""
    return repr(content) if content else ""


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
