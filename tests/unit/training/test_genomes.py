"""Only frames in coding regions are kept, if the user asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from virnuc_core.errors import InputError
from virnuc_core.reads.store import OrfStore

from .origins import LabelledReads, Origin

REGION_START = 600  # first base of each coding region, counted from 0
REGION_END = 2_100
READ_BASES = 150


def write_annotation(path: Path, names: list[str]) -> None:
    """Write a GFF file with a coding region in each genome: + in viruses, - in others."""
    lines = ["##gff-version 3"]
    for name in names:
        strand = "+" if name.startswith("virus") else "-"
        lines.append(f"{name}\tx\tgene\t1\t90\t.\t+\t.\tID=g")
        lines.append(f"{name}\tx\tCDS\t{REGION_START + 1}\t{REGION_END}\t.\t{strand}\t0\tID=c")
    path.write_text("\n".join(lines) + "\n")


def test_only_frames_in_coding_regions_are_kept_on_request(
    labelled_reads: LabelledReads, tmp_path: Path
) -> None:
    """Reads begin at whole codons of the region, so that the coding frame of a virus is frame 0."""
    genomes = labelled_reads.genomes()
    annotation = tmp_path / "a.gff"
    write_annotation(annotation, list(genomes))
    labelled_reads.reads = {}
    labelled_reads.origins = {}
    for genome, bases in genomes.items():
        for start in range(REGION_START - 450, REGION_END + 300, 75):
            read = f"{genome}_{start}"
            labelled_reads.reads[read] = bases[start : start + READ_BASES]
            labelled_reads.origins[read] = Origin(genome.split("_")[0], genome)

    all_rows = labelled_reads.split(tmp_path).rows
    coding = labelled_reads.split(
        tmp_path, coding_only=annotation, genomes=labelled_reads.genomes_file
    )

    store = OrfStore.open(tmp_path / "orfs.h5")
    read_ids = store.read_ids(0, store.n_reads)
    frame_of_row = {}
    for row in range(store.n_rows):
        key = int(store.row_read[row]), int(store.row_unique[row])
        frame_of_row[key] = int(store.row_frame[row])
    virus_frames = set()
    for row in coding.rows.itertuples():
        read_id = read_ids[row.read]
        start = int(read_id.split("_")[2])
        assert start >= REGION_START - 3
        assert start + READ_BASES <= REGION_END + 3
        if read_id.startswith("virus"):
            virus_frames.add(frame_of_row[row.read, row.unique])
    assert virus_frames == {0}
    n_outside = coding.left_out["frames outside coding regions"]
    assert n_outside == len(all_rows) - len(coding.rows) > 0


def test_an_annotation_that_is_not_valid_is_refused(
    labelled_reads: LabelledReads, tmp_path: Path
) -> None:
    annotation = tmp_path / "bad.gff"
    annotation.write_text("g\tx\tCDS\tone\t90\t.\t+\t0\tID=c\n")
    with pytest.raises(InputError, match=r"bad\.gff: not valid GFF"):
        labelled_reads.split(tmp_path, coding_only=annotation, genomes=labelled_reads.genomes_file)
