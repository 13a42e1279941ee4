"""Checks before a flow begins: a place to write to, and room for the results."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from virnuc.flows import output_folder, preflight
from virnuc_core.errors import (
    ConfigError,
    StorageError,
)
from virnuc_core.reads.stage import StageSpec, stage


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    output_folder.require_writable(tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        output_folder.require_writable(tmp_path / "file" / "out")


@pytest.mark.parametrize("form", ["fasta", "fastq", "fastq.gz"])
def test_the_room_that_reads_surely_need_is_known_before_they_are_staged(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By less than they need: a run that could end well is never refused."""
    reads, rng = tmp_path / f"r.{form}", random.Random(1)
    bases = ["".join(rng.choices("ACGT", k=150)) for _ in range(4000)]
    text = "".join(
        f">r{i}\n{b}\n" if form == "fasta" else f"@r{i}\n{b}\n+\n{'F' * 150}\n"
        for i, b in enumerate(bases)
    )
    reads.write_bytes(gzip.compress(text.encode()) if form.endswith("gz") else text.encode())
    staged = stage(
        StageSpec(reads=(str(reads),), model_length=300), tmp_path / "orfs.h5"
    ).counts.n_uniques
    rows = preflight.count_rows((str(reads),), "stop", 300)
    assert staged / 20 < rows < staged
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100 * rows - 1))
    with pytest.raises(StorageError, match=r"the embeddings of these reads .* are free; make room"):
        output_folder.require_writable(
            tmp_path / "new", 100 * rows, "the embeddings of these reads"
        )
    assert preflight.count_rows(("/dev/stdin",), "stop", 300) == 0
