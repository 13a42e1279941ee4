"""The command `virnuc inspect`."""

import sys
from typing import Annotated

from cyclopts import Parameter
from pydantic import Field

from virnuc.flows.cli.options import Flag, Json, command
from virnuc_core.errors import InputError
from virnuc_core.inspection.inspection import InspectSpec, inspect_reads
from virnuc_core.inspection.text import describe


class InspectSettings(InspectSpec):
    """Which reads are inspected, and how the answer is written."""

    all_reads: Annotated[Flag, Parameter(name="--all")] = Field(
        False, description="read all reads of all files: exact numbers"
    )
    as_json: Json = False
    # no options: nothing is downloaded, and reads with the same id are no error
    email: Annotated[str | None, Parameter(parse=False)] = None
    strict: Annotated[bool, Parameter(parse=False)] = False


@command(InspectSettings, "reads")
def inspect(settings: InspectSettings) -> int:
    """Tell what a run would see: files, pairs, samples, reads with an open frame, time and disk."""
    inspection = inspect_reads(settings)
    if settings.as_json:
        print(inspection.model_dump_json(indent=2))
    else:
        print("\n".join(describe(inspection)))
    for problem in inspection.problems:
        sys.stderr.write(f"virnuc: {problem}\n")
    return InputError.exit_code if inspection.problems else 0
