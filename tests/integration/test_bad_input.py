"""What cannot work is one line and its exit code before Prefect starts, and nothing is written."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from virnuc.flows import cli, output_folder, preflight
from virnuc.flows.settings.predict import PredictSettings
from virnuc_core.encoders.quantise import quantise
from virnuc_core.errors import InputError, StorageError, WeightsError
from virnuc_core.reads.simulate import SimulateSpec, simulate

FASTA = b">r1\nACGTACGTACGTACGTACGT\n"

MakeReads = Callable[[Path], Path]
Spoil = Callable[[Path], object]  # of a copied models directory


class Virnuc:
    """The command within this process, where no flow may be started."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def refuses(self, code: int, *words: object) -> str:
        """The only line that the command writes."""
        exit_code = cli.main([str(word) for word in words])
        output = self._capsys.readouterr()
        return only_line(exit_code, output.out, output.err, code)


@pytest.fixture
def virnuc(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Virnuc:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a flow was started")

    monkeypatch.setattr("virnuc.flows.flow_run.run_flow", never)
    monkeypatch.setattr("virnuc.flows.flow_body.run_body_alone", never)
    monkeypatch.setattr(
        "virnuc.flows.cli.run_from_terminal.prepare_prefect", lambda: None
    )  # it is this process's environment
    return Virnuc(capsys)


def only_line(exit_code: int, out: str, err: str, expected_code: int) -> str:
    """Return the only line of standard error, where nothing was written to standard output."""
    assert exit_code == expected_code, err
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("virnuc: ")
    return line


def write_file(folder: Path, name: str, data: bytes = FASTA) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def cut_short(folder: Path) -> Path:
    simulation = simulate(
        SimulateSpec(reads=200, seed=1), folder / "whole.fastq.gz"
    ).reads_file.read_bytes()
    return write_file(folder, "cut.fastq.gz", simulation[: len(simulation) // 2])


BAD_READS: dict[str, tuple[MakeReads, str]] = {
    "missing": (lambda f: f / "absent.fq", "absent.fq: no such file"),
    "too long a name": (
        lambda f: f / ("x" * 256),
        ": cannot be read: File name too long; check the path",
    ),
    "folder without reads": (
        lambda f: write_file(f, "in/notes.md", b"# notes\n").parent,
        "in: the folder holds no FASTA",
    ),
    "no sequences": (
        lambda f: write_file(f, "notes.txt", b"dear diary\n"),
        "notes.txt: this is neither FASTA nor FASTQ",
    ),
    "SAM": (
        lambda f: write_file(f, "a.sam", b"@HD\tVN:1.6\nr1\t4\n"),
        "a.sam: the SAM data is damaged",
    ),
    "proteins": (lambda f: write_file(f, "p.fa", b">p1\nMKLPEFILQ\n"), "p.fa:1: read 'p1': 'L'"),
    "folder of empty files that are not called reads": (
        lambda f: write_file(f, "in/a.txt", b"").parent,
        "in: the folder holds no FASTA",
    ),
    "cut gzip": (cut_short, "cut.fastq.gz: the gzip data ends early"),
    "no sequence": (
        lambda f: write_file(f, "half.fastq", b"@r1\nACGT\n+\nIIII\n@r2\n"),
        "half.fastq:5: read 'r2'",
    ),
}


@pytest.mark.parametrize(("make", "message"), BAD_READS.values(), ids=BAD_READS)
def test_reads_that_cannot_be_used(
    make: MakeReads, message: str, tmp_path: Path, models: Path, virnuc: Virnuc
) -> None:
    out_dir = tmp_path / "out"
    words = ["predict", make(tmp_path), "-o", out_dir, "--models", models, "--devices", "cpu:1"]
    assert message in virnuc.refuses(2, *words)
    assert not out_dir.exists()


def test_one_file_as_both_mates_is_refused_with_the_file_that_may_be_meant(
    tmp_path: Path, models: Path, virnuc: Virnuc
) -> None:
    first = write_file(tmp_path, "a_R1.fq", b"@r\nA\n+\nI\n")
    second = write_file(tmp_path, "a_R2.fq", b"@r\nA\n+\nI\n")
    words = ["predict", "-1", first, "-2", first, "-o", tmp_path / "out", "--models", models]
    assert virnuc.refuses(2, *words) == (
        f"virnuc: -1 and -2 name the same file, {first}; -2 takes the second mates (is it {second}?)"
    )


def test_a_sheet_whose_files_are_not_there_is_refused_by_its_line(
    tmp_path: Path, models: Path, virnuc: Virnuc
) -> None:
    reads = write_file(tmp_path, "a.fa")
    sheet = write_file(tmp_path, "sheet.csv", f"sample,fastq_1\na,'{reads}'\n".encode())
    out_dir = tmp_path / "out"
    words = ["predict", "--samples", sheet, "-o", out_dir, "--models", models, "--devices", "cpu:1"]
    assert virnuc.refuses(2, *words) == (
        f"virnuc: {sheet}:2: sample 'a': '{reads}': no such file or folder; "
        "remove the quotes around the path, the file is there without them"
    )
    assert not out_dir.exists()


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize(
    "name", ["summary.json", "viral.fasta.gz", "shards/00000.h5", "logs/worker-cpu-core-0.log"]
)
def test_a_directory_with_files_of_others_under_our_names(
    name: str, force: tuple[str, ...], tmp_path: Path, models: Path, virnuc: Virnuc
) -> None:
    out_dir = tmp_path / "theirs"
    (out_dir / name).parent.mkdir(parents=True, exist_ok=True)
    write_file(out_dir, name, b"precious")
    files_before = contents(tmp_path)
    reads = write_file(tmp_path, "a.fa")
    message = virnuc.refuses(
        2, "predict", reads, "-o", out_dir, "--models", models, "--devices", "cpu:1", *force
    )
    assert (
        f"theirs was not made by virnuc, and {name} would be overwritten; choose another directory"
        in message
    )
    assert contents(out_dir) == files_before


@pytest.mark.parametrize(
    "words", [("predict", "--write-viral"), ("validate", "--profile", "ci-smoke", "--reads")]
)
def test_an_input_that_lies_where_an_output_would(
    words: tuple[str, ...], tmp_path: Path, models: Path, virnuc: Virnuc
) -> None:
    out_dir = tmp_path / "f"
    reads = write_file(out_dir, "viral.fasta.gz", gzip.compress(FASTA))
    write_file(out_dir, ".virnuc", b'{"product": "virnuc"}')
    files_before = contents(tmp_path)
    for path in (reads, out_dir):
        message = virnuc.refuses(
            2, *words, path, "-o", out_dir, "--models", models, "--devices", "cpu:1"
        )
        assert "viral.fasta.gz is read, and would be overwritten" in message
    assert contents(tmp_path) == files_before


def test_places_that_are_no_output_directory(
    tmp_path: Path, models: Path, virnuc: Virnuc, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    work = tmp_path / "work"
    work.mkdir()
    reads = write_file(tmp_path, "a.fa")
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    words = ("predict", reads, "--models", models, "--devices", "cpu:1", "-o")
    assert "your home directory" in virnuc.refuses(2, *words, home)
    assert "the root directory" in virnuc.refuses(2, *words, "/")
    assert "holds the models directory" in virnuc.refuses(2, *words, models)
    assert "holds the models directory" in virnuc.refuses(2, *words, models.parent)
    assert "the working directory, where --force" in virnuc.refuses(2, *words, ".", "--force")
    assert [*home.iterdir(), *work.iterdir()] == []


def edit(part: str, **changes: object) -> Spoil:
    def change(models: Path) -> None:
        path = models / part / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


BAD_MODELS: dict[str, tuple[Spoil, str]] = {
    "missing": (shutil.rmtree, "no such directory"),
    "no part": (lambda m: shutil.rmtree(m / "esm2"), "no esm2/ in it"),
    "no other part": (lambda m: shutil.rmtree(m / "dnabert_s"), "no dnabert_s/ in it"),
    "no config": (
        lambda m: (m / "head" / "config.json").unlink(),
        "head/config.json: cannot be read",
    ),
    "no weights": (
        lambda m: (m / "esm2" / "model.safetensors").unlink(),
        "esm2/model.safetensors: no such file",
    ),
    "no tokenizer": (
        lambda m: (m / "dnabert_s" / "tokenizer.json").unlink(),
        "tokenizer.json: no such file",
    ),
    "cut weights": (
        lambda m: os.truncate(m / "esm2" / "model.safetensors", 200_000),
        "esm2/model.safetensors: cannot be read as safetensors",
    ),
    "another head": (
        edit("head", dna_width=768, protein_width=2560),
        "768 (DNA) + 2560 (protein), the encoders",
    ),
    "another width": (
        edit("esm2", ffn_width=128),
        "fc1.weight is [256, 64], config.json makes it [128, 64]",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_MODELS.values(), ids=BAD_MODELS)
def test_weights_that_cannot_be_used(
    spoil: Spoil, message: str, tmp_path: Path, models: Path, virnuc: Virnuc
) -> None:
    damaged_models = tmp_path / "models"
    out_dir = tmp_path / "out"
    shutil.copytree(models, damaged_models)
    spoil(damaged_models)
    words = [
        "predict",
        write_file(tmp_path, "r.fa"),
        "-o",
        out_dir,
        "--models",
        damaged_models,
        "--devices",
        "cpu:1",
    ]
    assert message in virnuc.refuses(3, *words)
    assert not out_dir.exists()


BAD_SETTINGS: dict[str, tuple[tuple[str, ...], int]] = {
    "cuda:63": (("--devices", "cuda:63"), 4),
    "cpu:4096": (("--devices", "cpu:4096"), 4),
    "fp16": (("--precision", "fp16"), 2),
    "token_budget": (("--token-budget", "3"), 2),
    "cluster: unknown form; compute on the nodes of a Dask scheduler (tcp://… or tls://…), of FILE.yaml, or of local:N "
    "(given 'foo')": (("--cluster", "foo"), 2),
    "nodes: unknown form; nodes that FILE.yaml asks for: 4, or 2:8": (
        ("--cluster", "local:2", "--nodes", "0"),
        2,
    ),
    "cluster absent.yaml: cannot be read (No such file": (("--cluster", "absent.yaml"), 2),
    "fdr, abstain: the head has no card": (("--fdr", "0.01"), 2),
    "abstain: the head has no card": (("--abstain",), 2),
}


@pytest.mark.parametrize(
    ("message", "words", "code"), [(message, *case) for message, case in BAD_SETTINGS.items()]
)
def test_settings_that_cannot_run(
    message: str, words: tuple[str, ...], code: int, tmp_path: Path, models: Path, virnuc: Virnuc
) -> None:
    devices = () if "--devices" in words else ("--devices", "cpu:1")
    given = [
        "predict",
        write_file(tmp_path, "r.fa"),
        "-o",
        tmp_path / "out",
        "--models",
        models,
        *devices,
        *words,
    ]
    assert message in virnuc.refuses(code, *given)
    assert not (tmp_path / "out").exists()


def test_as_a_process_it_is_one_line_too(tmp_path: Path, models: Path) -> None:
    damaged_models = tmp_path / "models"
    out_dir = tmp_path / "out"
    shutil.copytree(models, damaged_models)
    os.truncate(damaged_models / "esm2" / "model.safetensors", 200_000)
    write_file(tmp_path, "r.fa")
    words = [
        "predict",
        str(tmp_path / "r.fa"),
        "-o",
        str(out_dir),
        "--models",
        str(damaged_models),
        "--devices",
        "cpu:1",
    ]
    process = subprocess.run(
        [sys.executable, "-m", "virnuc.flows.cli", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={
            **os.environ,
            "PREFECT_API_URL": "http://127.0.0.1:9",
        },  # a flow would fail otherwise, and later
    )
    only_line(process.returncode, process.stdout, process.stderr, 3)
    assert not out_dir.exists()


@pytest.mark.parametrize("command", ["validate", "train", "scale"])
def test_every_flow_looks_before_it_starts(
    command: str, tmp_path: Path, models: Path, virnuc: Virnuc
) -> None:
    options_of_command: dict[str, list[str | Path]] = {
        "validate": ["--profile", "ci-smoke"],
        "train": ["--truth", tmp_path / "truth.tsv"],
        "scale": [],
    }
    reads = write_file(tmp_path, "notes.txt", b"dear diary\n")
    out_dir = tmp_path / "out"
    named_reads = [reads] if command == "train" else ["--reads", reads]
    words = [command, *named_reads, "-o", out_dir, "--models", models, "--devices", "cpu:1"]
    options = options_of_command[command]
    assert "notes.txt: this is neither" in virnuc.refuses(2, *words, *options)
    assert not out_dir.exists()


def test_an_inbox_looks_at_its_weights_before_it_starts(
    tmp_path: Path, models: Path, virnuc: Virnuc
) -> None:
    damaged_models = tmp_path / "models"
    out_dir = tmp_path / "out"
    shutil.copytree(models, damaged_models)
    os.truncate(damaged_models / "head" / "model.safetensors", 500)
    inbox = write_file(tmp_path, "in/r.fa").parent
    words = [
        "predict-inbox",
        "--inbox",
        inbox,
        "-o",
        out_dir,
        "--models",
        damaged_models,
        "--devices",
        "cpu:1",
    ]
    assert "head/model.safetensors" in virnuc.refuses(3, *words)
    assert not out_dir.exists()


def test_an_inbox_that_is_no_folder_and_a_missing_table_of_origins(
    tmp_path: Path, models: Path, virnuc: Virnuc
) -> None:
    words = ["-o", tmp_path / "out", "--models", models, "--devices", "cpu:1"]
    assert "no such folder" in virnuc.refuses(
        2, "predict-inbox", "--inbox", tmp_path / "absent", *words
    )
    assert "inside the inbox" in virnuc.refuses(2, "predict-inbox", "--inbox", tmp_path, *words)
    reads = write_file(tmp_path, "r.fa")
    assert "truth.tsv" in virnuc.refuses(
        2, "train", reads, "--truth", tmp_path / "truth.tsv", *words
    )
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written(tmp_path: Path, models: Path, virnuc: Virnuc) -> None:
    reads = write_file(tmp_path, "r.fa")
    words = ["--models", models, "--devices", "cpu:1"]
    assert "/proc" in virnuc.refuses(2, "predict", reads, "-o", "/proc/virnuc/out", *words)
    assert "is a file" in virnuc.refuses(2, "predict", reads, "-o", reads / "out", *words)


def test_looking_leaves_nothing_behind(tmp_path: Path, models: Path) -> None:
    reads = write_file(tmp_path, "r.fa")
    out_dir = tmp_path / "out"
    settings = PredictSettings(reads=(str(reads),), out=out_dir, models=models, devices="cpu:1")
    for was_there in (False, True):
        preflight.preflight(settings)
        entries = {entry.name for entry in tmp_path.iterdir()}
        assert entries - {"out"} == {"r.fa"}
        assert out_dir.exists() is was_there
        out_dir.mkdir(exist_ok=True)
    assert list(out_dir.iterdir()) == []


def test_a_calibration_of_other_weights_is_refused_before_reads_are_staged(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_models = tmp_path / "models"
    out_dir = tmp_path / "out"
    shutil.copytree(models, other_models)
    reads = tmp_path / "reads.fasta"
    simulate(SimulateSpec(reads=400, seed=3), reads)
    quantise(other_models, str(reads), torch.device("cpu"))
    monkeypatch.setattr(
        "virnuc_core.engine.devices.resolve_engine", lambda engine, kind: engine
    )  # as on a GPU
    arguments = {"reads": (str(reads),), "models": other_models, "devices": "cpu:1"}
    settings = PredictSettings(out=out_dir, precision="int8", **arguments)
    preflight.preflight(settings)
    config = other_models / "esm2" / "config.json"
    config.write_text(config.read_text().replace('"origin": "', '"origin": "another '))
    with pytest.raises(
        WeightsError,
        match="made for other weights of ESM-2; make it anew with virnuc models quantize",
    ):
        preflight.preflight(settings)
    assert not out_dir.exists()


def test_an_empty_file_among_others_and_a_skipped_record_are_no_reason_to_refuse(
    tmp_path: Path,
) -> None:
    good, empty = write_file(tmp_path, "good.fa"), write_file(tmp_path, "empty.fa", b"")
    preflight.count_rows((str(good), str(empty)), "stop")
    preflight.count_rows((str(empty),), "stop", needs_reads=False)
    with pytest.raises(InputError, match="holds no reads"):
        preflight.count_rows((str(empty),), "stop")
    broken_file = write_file(tmp_path, "broken.fastq", b"@r1\nACGT\n+\nII\n")
    preflight.count_rows((str(broken_file),), "skip")
    with pytest.raises(InputError, match=r"broken\.fastq:1"):
        preflight.count_rows((str(broken_file),), "stop")


@pytest.mark.timeout(20)
def test_pipes_are_not_drawn_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-").write_text("a file with the name of standard input")
    os.mkfifo(tmp_path / "pipe.fq")
    preflight.count_rows((str(tmp_path / "pipe.fq"), "-"), "stop")


def test_only_the_beginning_of_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from virnuc_core.reads.sources import Source

    num_bytes = 0
    original_read = Source.read

    def counted(self: Source, size: int) -> bytes:
        nonlocal num_bytes
        data = original_read(self, size)
        num_bytes += len(data)
        return data

    monkeypatch.setattr(Source, "read", counted)
    big = write_file(tmp_path, "big.fa", FASTA * 400_000)
    preflight.count_rows((str(big),), "stop")
    assert 0 < num_bytes < big.stat().st_size / 4


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("virnuc.flows.output_folder.tempfile.TemporaryFile", full)
    with pytest.raises(StorageError, match=r"No space left on device; .* free there; make room"):
        output_folder.require_writable(tmp_path / "out")


def test_samples_that_cannot_be_told_apart_are_refused(
    tmp_path: Path, models: Path, virnuc: Virnuc
) -> None:
    sheet = tmp_path / "sheet.csv"
    words = ["--models", models, "--devices", "cpu:1", "-o", tmp_path / "out"]
    sheet.write_text("sample,fastq_1,fastq_2\na/b,a.fq,\n")
    assert "sheet.csv:2: sample 'a/b': not the name" in virnuc.refuses(
        2, "predict", "--samples", sheet, *words
    )
    sheet.write_text(f"sample,fastq_1,fastq_2\na,a.fq,\nb,{'b' * 140_000},\n")
    assert "sheet.csv:3: field larger than field limit" in virnuc.refuses(
        2, "predict", "--samples", sheet, *words
    )
    reads = write_file(tmp_path, "r.fa")
    assert "names all reads" in virnuc.refuses(2, "predict", reads, "--samples", sheet, *words)
    assert "reads: none are named" in virnuc.refuses(2, "predict", "--sample-from", "name", *words)
    assert "only BAM, CRAM and SAM have read groups" in virnuc.refuses(
        2, "predict", reads, "--sample-from", "read-group", *words
    )
    assert not (tmp_path / "out").exists()
