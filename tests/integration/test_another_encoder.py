"""Another protein encoder in place of ESM-2: only the encoder's own files change, and all follows.

The tests work on a copy of the source code. In the copy the encoder has another name and title,
another width, and a tokenizer that adds one token instead of two.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("virnuc_core", "flows", "tasks", "deployments")
# The files that know ESM-2, as docs/encoders.md lists them. Who replaces the encoder edits these.
OWN_FILES = (
    "virnuc_core/encoder_names.py",
    "virnuc_core/encoders/registry.py",
    "virnuc_core/encoders/model_config.py",
    "virnuc_core/encoders/sizes.toml",
    "virnuc_core/encoders/tokenize.py",
    "virnuc_core/encoders/models.py",
    "virnuc_core/encoders/convert.py",
    "virnuc_core/baseline/networks.py",
    "virnuc_core/baseline/batches.py",
)
OLD_NAME = re.compile(r"esm-?2", re.IGNORECASE)
# Keys of VirNucPro's own files (approvals, benchmarks), which keep them whatever the encoder is called
KEPT_KEYS = ("esm2_still_bottleneck", "esm2_scaling")
TOKENIZER_WITHOUT_START = '''

class _WithStart(Esm2Tokenizer):
    pass


class Esm2Tokenizer:  # type: ignore[no-redef]
    """The same tokens without the first one of each row."""

    pad_id = _WithStart.pad_id
    vocab = _WithStart.vocab

    def encode(self, sequences):
        tokens, offsets = _WithStart().encode(sequences)
        rows = [tokens[a + 1 : b] for a, b in zip(offsets[:-1], offsets[1:])]
        import torch

        return torch.cat([tokens[:0], *rows]), offsets - torch.arange(len(offsets))
'''


def texts_of_code(path: Path) -> Iterator[str]:
    """Yield the names and texts of a module, without comments and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add(first.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node not in docstrings:
                yield node.value
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""


def test_no_other_module_or_template_names_the_encoder() -> None:
    naming = []
    for folder in PRODUCT:
        for path in sorted((ROOT / folder).rglob("*")):
            name = str(path.relative_to(ROOT))
            if name in OWN_FILES:
                continue
            if path.suffix == ".py":
                texts = list(texts_of_code(path))
            elif path.suffix == ".j2":
                texts = path.read_text(encoding="utf-8").splitlines()
            else:
                continue
            naming += [
                f"{name}: {text}"
                for text in texts
                if OLD_NAME.search(text) and text not in KEPT_KEYS
            ]
    assert naming == []


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source code with another protein encoder. Returns the import path."""
    copy = tmp_path_factory.mktemp("another") / "src"
    for folder in PRODUCT:
        target = copy if folder == "virnuc_core" else copy / "virnuc"
        shutil.copytree(
            ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "src" / "virnuc" / "__init__.py", copy / "virnuc")
    for name in OWN_FILES:
        path = copy / name
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("esm2", "amber").replace("ESM-2", "Amber"), encoding="utf-8")

    edit(copy / "virnuc_core/encoders/sizes.toml", r"(\[amber\]\ntiny = ).*", TINY)
    edit(
        copy / "virnuc_core/encoders/registry.py",
        r"(ESM2: Final = EncoderInfo\((?:\n .*)*?\n    n_special_tokens=)2",
        r"\g<1>1",
    )
    with (copy / "virnuc_core/encoders/tokenize.py").open("a", encoding="utf-8") as file:
        file.write(TOKENIZER_WITHOUT_START)
    return copy


TINY = r"\1{ layers = 3, width = 48, heads = 3, ffn_width = 96 }"


def edit(path: Path, pattern: str, replacement: str) -> None:
    """Replace the one place of a file that matches a pattern."""
    text, n_places = re.subn(pattern, replacement, path.read_text(encoding="utf-8"))
    assert n_places == 1, (path, pattern)
    path.write_text(text, encoding="utf-8")


def virnuc(source: Path, *arguments: object) -> str:
    """Run a command of the copy, and return what it prints."""
    return python(source, "-m", "virnuc.flows.cli", *arguments)


def python(source: Path, *arguments: object) -> str:
    """Run Python with the modules of the copy, and return what it prints."""
    run = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        cwd=source,  # Python looks for modules here first
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.slow
def test_runs_shards_report_criteria_and_cosines_follow_the_encoder(
    source: Path, tmp_path: Path
) -> None:
    reads, models, out = tmp_path / "reads.fastq.gz", tmp_path / "models", tmp_path / "out"
    virnuc(source, "simulate", reads, "--reads", 300, "--seed", 0)
    shown = virnuc(source, "models", "init-random", models, "--amber", "tiny", "--head", 300)
    assert "Amber tiny, DNABERT-S tiny" in shown
    given = ("--reads", reads, "--models", models, "--devices", "cpu:2", "--out", out)
    printed = virnuc(source, "validate", "--profile", "ci-smoke", *given)

    assert "  Amber scaling:          " in printed
    assert "GPU utilization (Amber):  " in printed
    assert "Stage 6: Amber " in printed
    assert "Consensus label agreement: 100.00% (target: >=99%)  [PASS]" in printed, (
        "the baseline, written apart from the engine, gives the same verdicts"
    )
    report_files = sorted((out / "report").iterdir())
    for path in [*report_files, *out.glob("*/summary.json"), *out.glob("*/run.json")]:
        if path.suffix in (".txt", ".md", ".json", ".html"):
            text = path.read_text(encoding="utf-8")
            for key in KEPT_KEYS:
                text = text.replace(key, "")
            assert not OLD_NAME.search(text), path

    report = json.loads((out / "report" / "report.json").read_text(encoding="utf-8"))
    assert all(figure["amber_scaling"] > 0 for figure in report["scaling"])
    assert report["scaling"]
    telemetry = report["run"]["telemetry"]
    assert {"amber_percent", "amber_samples"} <= set(telemetry["devices"][0])
    assert telemetry["busy"][0]["amber_s"] > 0

    run = out / "devices-2"
    with h5py.File(next(run.glob("telemetry/*.h5"))) as file:
        assert {"amber_s", "dnabert_s"} <= set(file["shards"])
        assert int(file["shards/protein_tokens"][:].sum()) > 0
    with h5py.File(run / "embeddings.h5") as file:
        assert file["embeddings"].shape[1] == 64 + 48, "DNA first, then the new width"

    program = (
        "import sys; from pathlib import Path; from virnuc_core.report.cosines import cosines\n"
        "first, second = map(Path, sys.argv[1:])\n"
        "print(*[f'{c.part} {c.n}' for c in cosines(first, second, dna_width=64)], sep=', ')"
    )
    parts = python(source, "-c", program, out / "devices-1", run)
    assert re.fullmatch(r"DNABERT-S (\d+), Amber \1\n", parts)
    virnuc(source, "verify", out)
