"""The inspection of reads for scripts and notebooks: `virnuc.inspect`."""

import os
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from virnuc_core.config import explain
from virnuc_core.errors import ConfigError
from virnuc_core.inspection.inspection import InspectSpec, inspect_reads
from virnuc_core.inspection.records import Inspection


def inspect(
    reads: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (), **settings: Any
) -> Inspection:
    """Find out what a run would see in some files of reads, without a model.

    Args:
        reads: A file or folder of reads, or several of them.
        **settings: Further fields of `InspectSpec`, such as `all_reads=True` or
            `sample_from="name"`.

    Returns:
        The files, pairs and samples, what the reads are like, and what a run would cost. `problems`
        names the files that cannot be used.

    Raises:
        ConfigError: A setting is unknown or has a wrong value, or samples cannot be told apart.
        InputError: The reads, or a sample sheet, cannot be found.
    """
    paths: list[str | os.PathLike[str]] = []
    if isinstance(reads, str | os.PathLike):
        paths.append(reads)
    else:
        paths += reads
    try:
        spec = InspectSpec(reads=tuple(os.fspath(path) for path in paths), **settings)
    except ValidationError as error:
        raise ConfigError(explain(error, show_values=True, model=InspectSpec)) from error
    return inspect_reads(spec)
