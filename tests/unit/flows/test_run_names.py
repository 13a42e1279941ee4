"""Names of samples and of flow runs in the UI."""

from __future__ import annotations

import pytest

from virnuc.flows.run_names import run_name
from virnuc_core.reads.sources import sample_name


@pytest.mark.parametrize(
    ("reads", "name"),
    [
        (["/d/lung_R1.fastq.gz"], "lung_R1"),
        (["a.fa", "b.fa", "c.fa"], "a+2"),
        (["-"], "stdin"),
        (["run.2026.fq.zst"], "run.2026"),
        (["groups/lung.bam"], "lung"),
        ([".gz"], ".gz"),
        (["x" * 200 + ".fa"], "x" * 60),
        (["https://h/lung%20R1.fastq.gz?X-Amz-Signature=5ec4e7/a.fa"], "lung%20R1"),
        (["HTTP://h/lung.fq#query-0123456789ab", "https://h/b?5ec4e7"], "lung+1"),
        (["a\x1b[2J\nb.fa"], "a\\x1b[2J b"),
        ([], "no-reads"),
        (("in/lung_R1.fastq.gz", "in/lung_R2.fastq.gz"), "lung"),
        (("lung_S1_L001_R1_001.fastq.gz", "lung_S1_L001_R2_001.fastq.gz"), "lung_S1_L001"),
        (("a_1.fq", "b_2.fq"), "a_1+1"),
    ],
)
def test_samples_have_short_names(reads: list[str], name: str) -> None:
    assert sample_name(reads) == name


def test_run_names_leave_out_what_is_not_known() -> None:
    parameters = {"reads": ["/d/lung.fq"], "profile": "/p/my.toml", "devices": "cpu:2"}
    assert run_name(parameters, "reads", "profile", "devices", "absent") == "lung · my · cpu:2"
    assert run_name({"inbox": "/srv/in"}, "inbox") == "in"
