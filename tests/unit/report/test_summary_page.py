"""The page for people after a prediction: what it says, and that names in it are plain text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from virnuc_core.answer import RANDOM_NOTE
from virnuc_core.reads.samples import SampleRow, add_summaries
from virnuc_core.report.summary_page import (
    OWN_AUTHORS,
    OWN_TITLE,
    PAGE,
    PAIRS_NOTE,
    TEXT_PAGE,
    _pair_counts,
    write_samples_page,
    write_summary_pages,
)
from virnuc_core.results import READS_HEADER
from virnuc_core.rundir import RunDir
from virnuc_core.runfiles import Attempt, RunRecord, RunSummary, digest, write

ROOT = Path(__file__).resolve().parents[3]
HOSTILE = "<script>alert(1)</script>[x](http://a.b)"
READS = (
    f"{HOSTILE}\t5200\t11\t40\tviral\t0.99\tvirus\t\n"
    "short\t90\t1\t2\tothers\t0.25\tothers\tshort_for_model,ambiguous\n"
    "long_other\t9000\t18\t60\tothers\t0.01\tothers\t\n"
    "stops\t99\t1\t0\tno_open_frame\t\t\tshort_for_model\n"
)


@pytest.fixture
def finished(tmp_path: Path) -> tuple[RunDir, RunSummary]:
    """A run of four reads by random weights; the id of one is markup."""
    run = RunDir(tmp_path)
    run.reads_table.write_text(READS_HEADER + READS)
    table_digest = digest(run.reads_table)
    assert table_digest is not None
    summary = RunSummary(
        n_reads=4,
        fates={"viral": 1, "others": 2, "no_open_frame": 1, "empty": 0, "failed": 0},
        n_short=2,
        model_length=500,
        threshold=0.5,
        origins={"esm2": "random, seed 7", "dnabert_s": "public", "head": "public"},
        has_card=True,
        files={"reads.tsv": table_digest},
    )
    attempt = Attempt(started="now", devices=(), command=("virnuc", "predict", HOSTILE))
    write(run.record, RunRecord(fingerprints={}, attempts=(attempt,), virnuc_version="0.1.0"))
    return run, summary


def test_the_page_answers_the_questions_of_a_reader(
    finished: tuple[RunDir, RunSummary],
) -> None:
    run, summary = finished
    page = write_summary_pages(run, "swab", summary).read_text()
    text = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    assert "1 of 4 reads are viral" in text
    assert "shorter than half of the classifier" in text
    assert "stop codon in each" in text
    assert "weights of ESM-2" in text
    assert "The virnuc authors, version 0.1.0" in text
    assert "no verdict: no open reading frame 1 25.0 %" in text
    assert "does not count as not viral" in text
    assert RANDOM_NOTE in text
    assert "10.1093/bib/bbaf224" in text
    assert "shorter than half of the classifier&#39;s length (short_for_model) 2 50.0 %" in text
    assert page.count("data:image/svg+xml;base64,") == 2


def test_only_viral_sequences_are_listed_as_contigs(finished: tuple[RunDir, RunSummary]) -> None:
    run, summary = finished
    write_summary_pages(run, "swab", summary)
    markdown = (run.root / TEXT_PAGE).read_text()
    contigs = markdown.split("Longest viral")[1].split("## ")[0]
    assert "5,200" in contigs
    assert "long_other" not in contigs


def test_names_are_plain_text_in_both_forms(finished: tuple[RunDir, RunSummary]) -> None:
    run, summary = finished
    page = write_summary_pages(run, HOSTILE, summary).read_text()
    markdown = (run.root / TEXT_PAGE).read_text()
    assert "<script" not in page + markdown
    assert "](http" not in markdown


def test_the_page_loads_nothing(finished: tuple[RunDir, RunSummary]) -> None:
    run, summary = finished
    page = write_summary_pages(run, "swab", summary).read_text()
    sources = re.findall(r"(?:src|href)=\"([^\"]*)", page)
    assert all(source.startswith("data:") for source in sources)
    assert "@import" not in page
    assert "url(" not in page


def test_a_page_with_the_same_content_is_not_written_again(
    finished: tuple[RunDir, RunSummary],
) -> None:
    run, summary = finished
    page = write_summary_pages(run, "swab", summary)
    written_ns = page.stat().st_mtime_ns
    write_summary_pages(run, "swab", summary)
    assert page.stat().st_mtime_ns == written_ns


def test_the_page_of_samples_has_a_row_for_each(
    finished: tuple[RunDir, RunSummary], tmp_path: Path
) -> None:
    _, summary = finished
    folder = tmp_path / "all"
    folder.mkdir()
    rows = [
        SampleRow(sample=HOSTILE, fate="predicted", reads=4, scored=3, viral=1, share=0.25),
        SampleRow(sample="broken", fate="failed", note="no such file"),
    ]
    page = write_samples_page(folder, "swabs", rows, add_summaries([summary, summary])).read_text()
    text = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    assert "2 of 8 reads are viral" in text
    assert "broken failed" in text
    assert "25.00 %" in text
    assert "<script" not in page + (folder / TEXT_PAGE).read_text()
    assert (folder / PAGE).exists()


def test_the_page_of_samples_leads_to_the_page_of_each(
    finished: tuple[RunDir, RunSummary], tmp_path: Path
) -> None:
    run, summary = finished
    name = "javascript:alert(1) & more"
    (tmp_path / name).mkdir()
    (tmp_path / name / "run.json").write_bytes(run.record.read_bytes())
    flags = "short_for_model=9698,ambiguous=32"
    rows = [
        SampleRow(sample=name, fate="predicted", reads=4, scored=3, viral=1, flags=flags),
        SampleRow(sample="broken", fate="failed", note="no such file"),
    ]
    exported = tmp_path / "export"
    exported.mkdir()
    total = add_summaries([summary])
    pages = {
        "./": write_samples_page(tmp_path, "swabs", rows, total),
        "./../": write_samples_page(exported, "swabs", rows, total, samples_folder=tmp_path),
    }
    for start, page in pages.items():
        text = page.read_text()
        (address,) = re.findall(r"href=\"([^\"]*)", text)
        assert address == f"{start}javascript%3Aalert%281%29%20%26%20more/summary.html"
        assert "9,698 too short for the classifier; 32 with letters other than" in text
        assert "virnuc predict" in text
        assert "· made" in text


def test_the_citation_is_that_of_the_repository() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["title"] == OWN_TITLE
    assert [author["name"] for author in citation["authors"]] == [OWN_AUTHORS]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    words = " ".join(readme.split())
    assert f"{OWN_TITLE}. {OWN_AUTHORS}, version {citation['version']}" in words


def test_the_page_of_pairs_says_what_to_report(finished: tuple[RunDir, RunSummary]) -> None:
    run, summary = finished
    of_pairs = summary.model_copy(update={"pairs": {"viral": 1, "others": 1}})
    markdown = write_summary_pages(run, "swab", of_pairs).with_suffix(".md").read_text()
    assert PAIRS_NOTE in markdown
    assert "all pairs" in markdown


def test_the_page_of_samples_names_those_that_are_in_no_figure(
    finished: tuple[RunDir, RunSummary], tmp_path: Path
) -> None:
    _, summary = finished
    rows = [
        SampleRow(sample="swab", fate="predicted", reads=4, scored=3, viral=1, share=0.25),
        SampleRow(sample="broken", fate="failed", note="no such file"),
        SampleRow(sample="late"),
    ]
    write_samples_page(tmp_path, "swabs", rows, add_summaries([summary]))
    page = (tmp_path / TEXT_PAGE).read_text()
    first_remark = page.partition("## What to know first")[2].strip().splitlines()[0]
    assert "not predicted: broken, late." in first_remark
    assert "3 samples · 1 failed · 1 waiting" in (tmp_path / PAGE).read_text()


def test_pairs_are_counted_in_the_words_of_the_page() -> None:
    counts = _pair_counts({"viral": 0, "others": 3, "no_open_frame": 2, "empty": 0, "failed": 1})
    assert counts == {
        "viral": 0,
        "not viral": 3,
        "no verdict: no open reading frame": 2,
        "no verdict: set aside (failed.tsv)": 1,
    }


def test_the_page_of_a_run_in_a_notebook_shows_no_command_of_the_kernel(
    finished: tuple[RunDir, RunSummary],
) -> None:
    run, summary = finished
    command = ("/env/site-packages/ipykernel_launcher.py", "-f", "/home/me/kernel-1.json")
    attempt = Attempt(started="now", devices=(), command=command)
    write(run.record, RunRecord(fingerprints={}, attempts=(attempt,), virnuc_version="0.1.0"))
    page = write_summary_pages(run, "swab", summary).read_text()
    assert "kernel" not in page
    assert "in a notebook" in page
