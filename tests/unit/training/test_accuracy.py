"""The comparison with other programs counts what each of them was asked, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.real.accuracy import (
    Asked,
    Verdicts,
    _four_mer_shares,
    _peptides,
    read_verdicts,
    share_cell,
    write_verdicts,
)
from virnuc_core.training.truth import OTHERS, VIRUS


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    """Four reads of four genomes."""
    table = pd.DataFrame(
        {
            "read": ["a", "b", "c", "d"],
            "label": [VIRUS, VIRUS, OTHERS, OTHERS],
            "kind": ["phage", "phage", "plant", "plant"],
            "source": [0, 1, 2, 3],
        }
    )
    return Asked(tmp_path, table, pd.DataFrame())


def test_verdicts_are_read_as_they_were_written(asked: Asked, tmp_path: Path) -> None:
    written = Verdicts(
        scores=np.array([0.9, 0.1, 0.2, 0.8]),
        is_called=np.array([True, False, False, True]),
        is_asked=np.array([True, True, True, False]),
        cpu_ms=2.5,
    )
    write_verdicts(tmp_path / "method.tsv", asked, written)
    verdicts = read_verdicts(tmp_path / "method.tsv", asked)
    assert verdicts.is_asked.tolist() == [True, True, True, False]
    assert verdicts.scores[:3].tolist() == [0.9, 0.1, 0.2]
    assert verdicts.is_called.tolist() == [True, False, False, False]
    assert verdicts.cpu_ms == 2.5


def test_a_read_without_a_line_does_not_count_as_not_viral(asked: Asked, tmp_path: Path) -> None:
    path = tmp_path / "tool.tsv"
    path.write_text("read\tscore\tviral\na\t\t1\nc\t\t0\nd\t\t1\n")
    verdicts = read_verdicts(path, asked)
    assert np.isnan(verdicts.scores).all()
    assert (
        share_cell(asked.table, verdicts, asked.table["label"].eq(VIRUS).to_numpy())[:4] == "1.00"
    )
    assert (
        share_cell(asked.table, verdicts, asked.table["label"].eq(OTHERS).to_numpy())[:4] == "0.50"
    )


def test_verdicts_on_other_reads_are_refused(asked: Asked, tmp_path: Path) -> None:
    path = tmp_path / "tool.tsv"
    path.write_text("read\tscore\tviral\na\t0.5\t1\nz\t0.5\t1\n")
    with pytest.raises(ValueError, match="z"):
        read_verdicts(path, asked)


def test_four_mers_are_the_same_on_both_strands() -> None:
    shares = _four_mer_shares(b"AAAAC")
    assert np.array_equal(shares, _four_mer_shares(b"GTTTT"))
    assert shares.sum() == pytest.approx(1)
    assert shares[0] == 0.25, "AAAA is one of AAAA, AAAC, GTTT and TTTT"


def test_peptides_lie_between_stop_codons_in_six_frames() -> None:
    codons = b"ATGGCT" * 10  # 20 amino acids
    peptides = _peptides(codons + b"TAA" + b"ATGGCT" + b"TAA")
    assert peptides[0] == b"MA" * 10
    assert b"MA" not in peptides, "it is too short to be searched"
