"""The commands of `virnuc`: their names, the modules that hold them, and what they do.

Nothing of a command is imported here, so that `virnuc --help` answers at once.
"""

from dataclasses import dataclass
from typing import Final

_PACKAGE: Final = "virnuc.flows.cli"


@dataclass(frozen=True)
class CommandEntry:
    """A command, as `virnuc --help` lists it.

    Attributes:
        name: What the user types after `virnuc`.
        module: The module of this package that holds the command.
        summary: What the command does, in one line.
    """

    name: str
    module: str
    summary: str

    @property
    def import_path(self) -> str:
        """Return the place of the command's function, as `package.module:function`."""
        function = self.name.replace("-", "_")
        return f"{_PACKAGE}.{self.module}:{function}"


# in the order of `virnuc --help`
COMMANDS: Final = (
    CommandEntry(
        "validate",
        module="flow_commands",
        summary="prove this machine against a profile: the validation flow",
    ),
    CommandEntry(
        "predict",
        module="predict_command",
        summary="say which reads are viral: the production flow",
    ),
    CommandEntry(
        "inspect",
        module="inspect_command",
        summary="what a run would see in some reads, and what it would cost, without a model",
    ),
    CommandEntry(
        "predict-inbox",
        module="flow_commands",
        summary="predict each new file of a folder, once",
    ),
    CommandEntry(
        "scale",
        module="flow_commands",
        summary="the scaling curve over the devices of this machine",
    ),
    CommandEntry(
        "tune",
        module="flow_commands",
        summary="the fastest engine settings for this machine and these reads",
    ),
    CommandEntry(
        "profile",
        module="flow_commands",
        summary="where the time goes: profiler traces and tables",
    ),
    CommandEntry(
        "train",
        module="flow_commands",
        summary="fit the head on labelled reads",
    ),
    CommandEntry(
        "approve",
        module="approve_command",
        summary="answer a validation that waits for its reviewer",
    ),
    CommandEntry(
        "models",
        module="model_commands",
        summary="make, convert, fetch or check weights",
    ),
    CommandEntry(
        "simulate",
        module="read_commands",
        summary="write labelled synthetic reads",
    ),
    CommandEntry(
        "sample",
        module="read_commands",
        summary="draw a subset with the same read lengths; mates stay together",
    ),
    CommandEntry(
        "compare",
        module="result_commands",
        summary="agreement of two runs or result files",
    ),
    CommandEntry(
        "report",
        module="report_commands",
        summary="render a validation's report again",
    ),
    CommandEntry(
        "rescore",
        module="result_commands",
        summary="score stored embeddings again: another head or threshold",
    ),
    CommandEntry(
        "export",
        module="result_commands",
        summary="a finished run for MultiQC, Kraken's readers and contigs",
    ),
    CommandEntry(
        "overhead",
        module="flow_commands",
        summary="what commits, the sampler and loading models anew cost, in a validation",
    ),
    CommandEntry(
        "verify",
        module="report_commands",
        summary="recompute every number of a report from raw files",
    ),
    CommandEntry(
        "history",
        module="report_commands",
        summary="the trend of past validations",
    ),
    CommandEntry(
        "profiles",
        module="report_commands",
        summary="the profiles a validation can be held against",
    ),
    CommandEntry(
        "devices",
        module="device_commands",
        summary="the devices of this machine",
    ),
    CommandEntry(
        "doctor",
        module="doctor",
        summary="is this machine sound? one line a check",
    ),
)
COMMAND_NAMES: Final = tuple(entry.name for entry in COMMANDS)
