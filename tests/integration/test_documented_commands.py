"""Every command in the documentation runs here, or a table says why it cannot and where it runs.

The tutorial of the README and the first hour run as one sequence in an empty folder, as somebody
who reads them would type it. Only the large models are replaced by tiny random ones.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .processes import ROOT

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "deployments/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)
CODE_LANGUAGES = ("python", "yaml", "toml", "json")
# First words of lines that are commands. Other lines of a block are output.
PROGRAMS = (
    *("virnuc", "make", "git", "source", "pip", "python", "python3", "mypy", "sha256sum", "export"),
    *("docker", "kubectl", "prefect", "dask", "sbatch", "cat", "column", "cut", "multiqc"),
    *("fastq-dump", "hostile", "bowtie2", "extract_kraken_reads.py", "deployments/ci-validate.sh"),
    *("rattler-build", "conda", "mamba", "snakemake", "nextflow", "apptainer", "pytest"),
    *(
        "CONDA_OVERRIDE_CUDA=13.0",
        "CUDA_VISIBLE_DEVICES=0",
        "CUDA_VISIBLE_DEVICES=1",
        "VIRNUC_CI_FIRST=1",
    ),
)

# What is typed in place of a command: tiny models, and few reads.
REPLACED = {
    "fastq-dump --split-files --gzip -X 100000 SRR10971381": (
        "for i in 1 2; do cp sample_R$i.fastq.gz SRR10971381_$i.fastq.gz; done"
    ),
    "virnuc inspect run/": "virnuc inspect run7/",  # `run` is the README's run here
    "virnuc simulate labelled.fastq.gz --reads 20000": (
        "virnuc simulate labelled.fastq.gz --reads 200 --force"
    ),
    "virnuc simulate labelled.fastq.gz --reads 20000 --pairs": (
        "virnuc simulate labelled.fastq.gz --reads 200 --pairs --force"
    ),
}
# The commands that run here, in this order, by page. A command that stands on several pages with
# the same words runs once.
TUTORIAL = {
    "README.md": (
        "virnuc models init-random models --esm2 tiny --dnabert-s tiny",
        "virnuc simulate sample.fastq.gz --reads 200 --pairs",
        "virnuc predict -1 sample_R1.fastq.gz -2 sample_R2.fastq.gz -o run --models models",
    ),
    "docs/first-hour.md": (
        "virnuc models verify models",
        "fastq-dump --split-files --gzip -X 100000 SRR10971381",
        "virnuc predict SRR10971381_1.fastq.gz SRR10971381_2.fastq.gz -o lung --models models "
        "--write-viral --write-nonviral",
        "cut -f 3 lung/pairs.tsv | sort | uniq -c",
        "virnuc export lung",
    ),
}
OTHER_PAGES = {
    "docs/reads.md": (
        "virnuc inspect run/",
        "virnuc sample -1 lung_R1.fq.gz -2 lung_R2.fq.gz -n 100000 -o small.fq.gz",
        "virnuc sample --interleaved mixed.fq.gz -n 100000 -o small.fq.gz",
        "virnuc sample run7/ -n 100000 -o small.fq.gz",
        "virnuc sample long.fastq.gz -n 100000 -o small.fq.gz",
    ),
    "docs/how-to/train-a-classifier.md": ("virnuc simulate labelled.fastq.gz --reads 20000",),
    "docs/training.md": ("virnuc simulate labelled.fastq.gz --reads 20000 --pairs",),
}

# Why commands that begin so do not run here. A file of tests is where the same runs.
GPU = "needs a GPU and real weights; on CPUs: tests/integration/test_validate_flow.py"
NETWORK = "needs a network"
SERVER = "needs a Prefect server and workers; tests/integration/test_workers.py has both"
CLUSTER = "needs several machines; on one: tests/integration/test_cluster_flows.py"
TRAINS = "takes long; with few reads: tests/integration/test_train_flow.py"
OTHER_TOOL = "needs a program that virnuc does not install"
EARLIER_RUN = "needs a validation; tests/integration/test_validate_flow.py makes and reads one"
RECORD = "how a measurement on other machines was made"
ELSEWHERE = {
    "git clone": NETWORK,
    "make setup": "makes the environment of these tests",
    "source .venv/bin/activate": "this test puts the environment into PATH",
    "make demo": "runs as a step of the CI, .ci/run",
    "make test": "are these tests",
    "make check": "is a step of the CI, .ci/run",
    "make lines": "is a step of the CI, .ci/run",
    "make kernels-check": "is a step of the CI, .ci/run",
    "make bench": "measures this machine for many minutes",
    "pip install": NETWORK,
    "pip check": "tests/unit/test_requirements.py compares the versions",
    "make deploy": SERVER,
    "make alerts": SERVER,
    "prefect ": SERVER,
    "export PREFECT_": SERVER,
    "export VIRNUC_": SERVER,
    "CUDA_VISIBLE_DEVICES=": SERVER,
    "make image": OTHER_TOOL,
    "docker ": OTHER_TOOL,
    "rattler-build ": "tests/integration/test_conda_package.py",
    "conda ": OTHER_TOOL,
    "nextflow ": OTHER_TOOL,
    "virnuc serve": "tests/integration/test_serve.py ends it again",
    "systemctl ": "needs a login with systemd",
    "make dist": "tests/integration/test_wheel.py makes and uses a wheel",
    "CONDA_OVERRIDE_CUDA=": OTHER_TOOL,
    "snakemake ": "tests/integration/test_snakemake.py",
    "kubectl ": OTHER_TOOL,
    "sbatch ": OTHER_TOOL,
    "cat > slurm.yaml": OTHER_TOOL,
    "multiqc ": OTHER_TOOL,
    "hostile ": OTHER_TOOL,
    "bowtie2 ": OTHER_TOOL,
    "extract_kraken_reads.py": "tests/unit/report/test_kraken.py repeats its rule",
    "dask ": CLUSTER,
    "virnuc predict cleaned ": "needs hostile; names of files: tests/unit/reads/test_file_names.py",
    "virnuc predict -1 lung.host_removed": OTHER_TOOL,
    "virnuc predict reads.fastq.gz -o /shared/run": CLUSTER,
    "virnuc predict reads.fastq.gz -o run --models models --cluster": CLUSTER,
    "virnuc predict reads.fastq.gz -o run --models models --devices cuda": GPU,
    "virnuc predict reads.fastq.gz -o killed ": f"{GPU}; tests/faults kills runs on cores",
    "virnuc predict reads.fastq.gz -o whole ": GPU,
    "virnuc predict reads.fq.gz -o run --models models --metrics-file": (
        "needs a folder of node_exporter; tests/unit/telemetry/test_metrics_file.py"
    ),
    "virnuc predict https:": f"{NETWORK}; with a server of the test: tests/unit/reads/test_remote.py",
    "virnuc predict-inbox": "tests/integration/test_command_line.py",
    "virnuc predict ncbi:": f"{NETWORK}; with a server of the test: tests/unit/reads/test_remote.py",
    "column -ts $'\\t' first/reads.tsv": "shows what the download gave",
    "virnuc predict --samples": "tests/integration/test_predict_flow.py",
    "virnuc predict run42": "tests/integration/test_predict_flow.py",
    "virnuc predict lung_R1.fq.gz": "tests/unit/reads/test_pairs.py",
    "virnuc predict -1 lung_R1.fq.gz": "tests/unit/reads/test_pairs.py",
    "virnuc predict --interleaved": "tests/unit/reads/test_pairs.py",
    "virnuc predict sample.fastq.gz -o run --models models --fdr": TRAINS,
    "virnuc export results": "tests/unit/report/test_exports.py",
    "virnuc export RUN": "tests/unit/report/test_exports.py",
    "virnuc inspect --all": "needs ../shared/data; tests/unit/reads/test_inspection.py",
    "virnuc doctor": "tests/integration/test_doctor.py",
    "virnuc models fetch": NETWORK,
    "virnuc models convert": "needs real weights; tests/unit/encoders/test_verify.py has a few",
    "virnuc models quantize": "tests/unit/encoders/test_calibration.py",
    "virnuc models heads": "tests/unit/flows/test_model_commands.py",
    "virnuc models use-head": "tests/unit/flows/test_model_commands.py",
    "virnuc train": TRAINS,
    "virnuc validate": GPU,
    "virnuc verify": EARLIER_RUN,
    "virnuc report": EARLIER_RUN,
    "virnuc history": EARLIER_RUN,
    "virnuc scale": GPU,
    "virnuc tune": "tests/integration/test_tune.py",
    "virnuc profile": "tests/integration/test_profile.py",
    "virnuc approve": "tests/integration/test_approval_report.py",
    "virnuc compare": "tests/unit/flows/test_result_commands.py",
    "virnuc simulate reads.fastq.gz": RECORD,
    "virnuc models init-random models --esm2 t36_3B": RECORD,
    "virnuc models init-random models --amber": "tests/integration/test_another_encoder.py",
    "VIRNUC_CI_FIRST=1": "tests/integration/test_ci_job.py",
    "deployments/ci-validate.sh": "tests/integration/test_ci_job.py",
    "python3 tests/benchmarks/": RECORD,
    "python tests/benchmarks/": RECORD,
    "python -m tests.real": RECORD,
    "mypy": "is a step of the CI, .ci/run",
    "sha256sum": OTHER_TOOL,
}


@dataclass(frozen=True)
class Fence:
    """A block of code in a page.

    Attributes:
        page: The page, relative to the project.
        line: Its first line, counted from 1.
        language: The word behind its first fence.
        lines: Its lines.
    """

    page: str
    line: int
    language: str
    lines: tuple[str, ...]

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands, without comments; a line that ends in a backslash goes on in the next."""
        if self.language in CODE_LANGUAGES:
            return ()
        text = "\n".join(self.lines)
        text = re.sub(r"<<'END'\n.*?\nEND\b", "", text, flags=re.DOTALL)  # the text of a file
        text = re.sub(r"\s*\\\n\s*", " ", text)
        commands = []
        for line in text.splitlines():
            command = re.split(r"\s+#\s", line)[0].strip().removeprefix("$ ")
            if command.partition(" ")[0] in PROGRAMS:
                commands.append(command)
        return tuple(commands)


def find_fences(page: str) -> Iterator[Fence]:
    """Yield the blocks of code of a page."""
    language: str | None = None  # None: outside of a block
    lines: list[str] = []
    start = 0
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        is_border = line.strip().startswith("```")
        if language is None and is_border:
            language = line.strip().removeprefix("```")
            lines = []
            start = number
        elif is_border:
            yield Fence(page, start, str(language), tuple(lines))
            language = None
        elif language is not None:
            lines.append(line)


FENCES = [fence for page in PAGES for fence in find_fences(page)]
RUN_HERE = {
    command
    for pages in (TUTORIAL, OTHER_PAGES)
    for commands in pages.values()
    for command in commands
}


def reasons_for(command: str) -> list[str]:
    """Return the beginnings in the table of commands that run elsewhere which fit a command."""
    return [start for start in ELSEWHERE if command.startswith(start)]


def test_every_command_of_the_documentation_runs_or_has_a_reason() -> None:
    unknown = []
    for fence in FENCES:
        for command in fence.commands:
            if command not in RUN_HERE and not reasons_for(command):
                unknown.append(f"{fence.page}:{fence.line}: {command}")
    assert unknown == []
    assert len([command for fence in FENCES for command in fence.commands]) > 100


def test_every_block_without_commands_is_code_or_output() -> None:
    """A block that begins with an unknown program would otherwise be taken for output."""
    first_lines = []
    for fence in FENCES:
        if fence.commands or fence.language in CODE_LANGUAGES:
            continue
        first_line = next(line for line in fence.lines if line.strip())
        if not any(first_line.startswith(start) for start in OUTPUTS):
            first_lines.append(f"{fence.page}:{fence.line}: {first_line}")
    assert first_lines == []


# How blocks begin that show output, or a part of a file.
OUTPUTS = (
    "sample,fastq_1,fastq_2",  # a sample sheet
    "UNFAMILIAR SAMPLE",  # the last line of a run
    "0 of 200 reads are viral",
    "0 of 2,314 reads are viral",
    "N of 160 reads are viral",
    "pairs: lung_R1.fq.gz and",
    "        121-131",
    "virnuc_state{",
    "17:05:11",
    "10:43:15",
    "[Service]",
    "UNFAMILIAR SAMPLE",
    "run/shards/00001.h5: cannot be read",
    "C\tr7",
    ' "own_sha256"',
    "jobqueue:",
    "rule virnuc:",
    "    resources:",
    "include {",
    "process {",
    "====",
    "Performance Validation Summary",
)


def test_the_tables_name_commands_and_tests_that_exist() -> None:
    commands_by_page: dict[str, list[str]] = {page: [] for page in PAGES}
    for fence in FENCES:
        commands_by_page[fence.page] += fence.commands
    for pages in (TUTORIAL, OTHER_PAGES):
        for page, commands in pages.items():
            assert [command for command in commands if command not in commands_by_page[page]] == []
    all_commands = {command for commands in commands_by_page.values() for command in commands}
    assert REPLACED.keys() <= all_commands
    used = {start for command in all_commands for start in reasons_for(command)}
    unused = sorted(ELSEWHERE.keys() - used)
    assert [start for start in unused if start.startswith("virnuc")] == []
    for reason in ELSEWHERE.values():
        for path in re.findall(r"(?:tests/|\.ci/)[\w/.-]*\w", reason):
            assert (ROOT / path).exists(), path


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """What the commands of the tutorial print, typed one after the other in an empty folder."""
    folder = tmp_path_factory.mktemp("reader")
    texts = {}
    for commands in TUTORIAL.values():
        for command in commands:
            texts[command] = type_in(folder, command)
    return Outputs(folder, texts)


@dataclass(frozen=True)
class Outputs:
    """The folder of a reader, and what each command printed there."""

    folder: Path
    texts: dict[str, str]


def type_in(folder: Path, command: str) -> str:
    """Run a command in a shell, as a reader would type it; return its standard output.

    Predictions need no server here; tests/integration/test_predict_flow.py has them with one.
    """
    line = REPLACED.get(command, command)
    if line.startswith("virnuc predict "):
        line += " --no-prefect"
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "VIRNUC_"))
    }
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    process = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert process.returncode == 0, f"{command}\n{process.stdout}\n{process.stderr}"
    # The table of stages is for --verbose only.
    for alarming in ("Traceback", "WARNING", "ERROR", "prefect", "Total wall time"):
        assert alarming not in process.stderr
    return process.stdout


@pytest.mark.slow
def test_a_reader_gets_from_the_readme_to_an_answer(outputs: Outputs) -> None:
    answer = outputs.texts[TUTORIAL["README.md"][-1]]
    assert "of 200 reads are viral" in answer
    assert "of 100 pairs" in answer
    assert "Time: " in answer.splitlines()[-1]
    [shown] = [fence for fence in FENCES if fence.lines[0].endswith(" of 100 pairs")]
    assert words_of_table(shown.lines) == words_of_table(answer.splitlines())
    page = (outputs.folder / "run" / "summary.md").read_text(encoding="utf-8")
    for part in ("of 200 reads are viral", "no verdict", "are random", "VirNucPro: Li et al."):
        assert part in page


def words_of_table(lines: Iterable[str]) -> list[str]:
    """Return the words of the lines of counts in an answer, without the numbers."""
    rows = [re.fullmatch(r"  ( *\D+?)\s+[\d,]+\s+[\d.]+ %", line) for line in lines]
    return [row[1] for row in rows if row]


@pytest.mark.slow
def test_the_first_hour_ends_with_files_for_other_tools(outputs: Outputs) -> None:
    lung = outputs.folder / "lung"
    words = outputs.texts["cut -f 3 lung/pairs.tsv | sort | uniq -c"].split()
    num_lines = sum(int(word) for word in words if word.isdigit())
    assert num_lines == 100 + 1  # the pairs, and the names of the columns
    for verdict in ("viral", "nonviral"):
        for mate in ("R1", "R2"):
            assert (lung / f"{verdict}_{mate}.fastq.gz").exists()
    assert "virnuc_general_mqc.json" in outputs.texts["virnuc export lung"]


@pytest.mark.slow
def test_commands_of_other_pages_run_with_small_inputs(outputs: Outputs) -> None:
    folder = outputs.folder
    for name in ("lung_R{}.fq.gz", "run7/a_R{}.fastq.gz"):
        for mate in (1, 2):
            copy = folder / name.format(mate)
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(folder / f"sample_R{mate}.fastq.gz", copy)
    shutil.copy(folder / "sample_R1.fastq.gz", folder / "long.fastq.gz")
    interleave(folder / "sample_R1.fastq.gz", folder / "sample_R2.fastq.gz", folder / "mixed.fq.gz")
    for commands in OTHER_PAGES.values():
        for command in commands:
            for sample in folder.glob("small*"):  # each line of that page shows a way by itself
                sample.unlink()
            type_in(folder, command)


def interleave(first: Path, second: Path, out: Path) -> None:
    """Write the reads of two files in turn."""
    with gzip.open(first, "rt") as firsts, gzip.open(second, "rt") as seconds:
        lines = (firsts.readlines(), seconds.readlines())
    records = []
    for start in range(0, len(lines[0]), 4):
        records += [line for side in lines for line in side[start : start + 4]]
    with gzip.open(out, "wt") as file:
        file.writelines(records)
