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
        example: A command line that shows its use. Empty if the module has the example.
    """

    name: str
    module: str
    summary: str
    example: str

    @property
    def import_path(self) -> str:
        """Return the place of the command's function, as `package.module:function`."""
        function = self.name.replace("-", "_")
        return f"{_PACKAGE}.{self.module}:{function}"


# in the order of `virnuc --help`: what is used most comes first
COMMANDS: Final = (
    CommandEntry(
        "predict",
        module="predict_command",
        summary="say which reads are viral",
        example="virnuc predict -1 s_R1.fastq.gz -2 s_R2.fastq.gz --models models -o results",
    ),
    CommandEntry(
        "models",
        module="model_commands",
        summary="make, convert, fetch or check weights",
        # cyclopts takes the end of this help text from the module, because it has subcommands.
        example="",
    ),
    CommandEntry(
        "doctor",
        module="doctor",
        summary="is this machine sound? one line a check",
        example="virnuc doctor --models models",
    ),
    CommandEntry(
        "devices",
        module="device_commands",
        summary="the devices of this machine",
        example="virnuc devices",
    ),
    CommandEntry(
        "inspect",
        module="inspect_command",
        summary="what a run would see in some reads, and what it would cost, without a model",
        example="virnuc inspect reads.fastq.gz",
    ),
    CommandEntry(
        "predict-inbox",
        module="flow_commands",
        summary="predict each new file of a folder, once",
        example="virnuc predict-inbox --inbox incoming --models models -o results",
    ),
    CommandEntry(
        "serve",
        module="serve_command",
        summary="keep workers with loaded models, so that small runs of predict start at once",
        example="virnuc serve --idle 15m",
    ),
    CommandEntry(
        "export",
        module="result_commands",
        summary="a finished run for MultiQC, Kraken's readers and contigs",
        example="virnuc export results",
    ),
    CommandEntry(
        "rescore",
        module="result_commands",
        summary="score stored embeddings again: another head or threshold",
        example="virnuc rescore results --threshold 0.9 -o stricter",
    ),
    CommandEntry(
        "compare",
        module="result_commands",
        summary="agreement of two runs or result files",
        example="virnuc compare results other_results",
    ),
    CommandEntry(
        "train",
        module="flow_commands",
        summary="fit the head on labelled reads",
        example="virnuc train reads.fastq.gz --truth truth.tsv --models models -o trained",
    ),
    CommandEntry(
        "simulate",
        module="read_commands",
        summary="write labelled synthetic reads",
        example="virnuc simulate reads.fastq.gz --reads 1000",
    ),
    CommandEntry(
        "sample",
        module="read_commands",
        summary="draw a subset with the same read lengths; mates stay together",
        example="virnuc sample reads.fastq.gz --reads 1000 -o subset.fastq.gz",
    ),
    CommandEntry(
        "validate",
        module="flow_commands",
        summary="prove this machine against a profile: the validation flow",
        example="virnuc validate reads.fastq.gz --profile ci-smoke --models models -o proof",
    ),
    CommandEntry(
        "report",
        module="report_commands",
        summary="render a validation's report again",
        example="virnuc report proof",
    ),
    CommandEntry(
        "approve",
        module="approve_command",
        summary="answer a validation that waits for its reviewer",
        example="virnuc approve proof",
    ),
    CommandEntry(
        "verify",
        module="report_commands",
        summary="recompute every number of a report from raw files",
        example="virnuc verify proof",
    ),
    CommandEntry(
        "history",
        module="report_commands",
        summary="the trend of past validations",
        example="virnuc history history.jsonl",
    ),
    CommandEntry(
        "profiles",
        module="report_commands",
        summary="the profiles a validation can be held against",
        example="virnuc profiles",
    ),
    CommandEntry(
        "scale",
        module="flow_commands",
        summary="the scaling curve over the devices of this machine",
        example="virnuc scale reads.fastq.gz --models models -o scaling",
    ),
    CommandEntry(
        "tune",
        module="flow_commands",
        summary="the fastest engine settings for this machine and these reads",
        example="virnuc tune reads.fastq.gz --models models -o tuning",
    ),
    CommandEntry(
        "profile",
        module="flow_commands",
        summary="where the time goes: profiler traces and tables",
        example="virnuc profile reads.fastq.gz --models models -o traces",
    ),
    CommandEntry(
        "overhead",
        module="flow_commands",
        summary="what commits, the sampler and loading models anew cost, in a validation",
        example="virnuc overhead proof --models models",
    ),
)
COMMAND_NAMES: Final = tuple(entry.name for entry in COMMANDS)
