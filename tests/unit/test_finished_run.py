"""A finished run as an object: its tables and embeddings are those of the files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest

import virnuc
from virnuc_core.checked_files import with_page_digest
from virnuc_core.config import EngineSpec
from virnuc_core.encoders.convert import init_random
from virnuc_core.errors import ConfigError, DamagedFileError, InputError, RunMismatchError
from virnuc_core.finished_run import _name_arguments
from virnuc_core.reads.simulate import SimulateSpec, simulate

pytestmark = pytest.mark.usefixtures("forked_workers")

ENGINE = EngineSpec(token_budget=1024, dna_token_budget=1024, shard_tokens=1024, heartbeat_s=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, and 60 pairs of reads, some of them equal."""
    folder = tmp_path_factory.mktemp("notebook")
    init_random(folder / "models", "tiny", "tiny", model_length=300, seed=3)
    simulate(SimulateSpec(reads=60, read_length=150, seed=4), folder / "reads.fastq")
    (folder / "pairs").mkdir()
    lines = (folder / "reads.fastq").read_text().splitlines()
    records = [lines[start : start + 4] for start in range(0, len(lines), 4)]
    for mate, chosen in (("1", records[:30]), ("2", records[30:])):
        text = ""
        chosen[7] = chosen[8]  # a sequence that occurs twice
        for number, (_, bases, plus, qualities) in enumerate(chosen):
            # A quote at the start of an id must survive every table.
            text += f'@"r{number}/{mate}\n{bases}\n{plus}\n{qualities}\n'
        (folder / "pairs" / f"sample_R{mate}.fastq").write_text(text)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> virnuc.Run:
    """A prediction on one core."""
    return virnuc.predict(
        folder / "pairs",
        out=folder / "run",
        models=folder / "models",
        devices="cpu:1",
        engine=ENGINE,
    )


def test_tables_are_those_of_the_files(run: virnuc.Run) -> None:
    assert len(run.reads) == 60
    assert run.reads["id"].iloc[:2].tolist() == ['"r0/1', '"r0/2']
    assert len(run.pairs) == 30
    has_no_score = run.reads["viral_score"].isna()
    assert (run.reads["fate"] == "no_open_frame").equals(has_no_score)
    counts = run.summary.iloc[0]
    assert counts["reads"] == 60
    assert counts["no_open_frame"] == has_no_score.sum() > 0
    assert counts["viral_pairs"] == (run.pairs["fate"] == "viral").sum()


def test_each_frame_has_the_score_and_the_embedding_of_its_own_sequence(run: virnuc.Run) -> None:
    """Compare with VirNucPro's table and with `embeddings.h5`, which other code writes."""
    scores = pd.read_csv(run.folder / "prediction_results.txt", sep="\t", quoting=3)
    frames = run.frames
    assert frames.index.tolist() == scores["Sequence_ID"].tolist()
    assert np.allclose(frames["viral_score"], scores["score2"], atol=1e-6)
    assert (frames.index.str.rsplit("_chunk_", n=1).str[0] == frames["read"]).all()
    with h5py.File(run.folder / "embeddings.h5") as file:
        stored = file["embeddings"][:]
    assert len(stored) < len(frames)  # some sequences occur more than once
    assert np.array_equal(run.embeddings(), stored[frames["sequence"]])


def test_embeddings_follow_the_order_of_the_frames_that_are_asked_for(run: virnuc.Run) -> None:
    all_embeddings = run.embeddings()
    chosen = run.frames.iloc[[11, 3, 3, 40]]
    assert np.array_equal(run.embeddings(chosen), all_embeddings[[11, 3, 3, 40]])
    assert run.embeddings(run.frames.iloc[:0]).shape == (0, all_embeddings.shape[1])


def test_a_notebook_shows_the_summary_page_as_it_is(run: virnuc.Run, folder: Path) -> None:
    page = virnuc.open_run(folder / "run")._repr_html_()
    assert "no_open_frame" in page or "srcdoc" in page
    path = run.folder / "summary.html"
    path.write_text('<p title="a">7 &amp; 8</p>')  # as an older version writes it
    page = run._repr_html_()
    assert 'srcdoc="&lt;p title=&quot;a&quot;&gt;7 &amp;amp; 8&lt;/p&gt;"' in page
    assert "sandbox" in page
    path.write_text(with_page_digest("<p>7 of 8 reads are viral</p>\n"))
    assert "7 of 8" in run._repr_html_()
    path.write_text(path.read_text().replace("7 of 8", "0 of 8"))
    with pytest.raises(DamagedFileError, match=r"summary\.html: is not as the run left it"):
        run._repr_html_()


def test_what_is_no_finished_run_or_no_setting_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no finished run"):
        virnuc.open_run(folder)
    with pytest.raises(ConfigError, match="treshold"):
        virnuc.predict("reads.fastq", out=folder / "x", models=folder / "models", treshold=0.9)


def test_messages_name_arguments_of_python(run: virnuc.Run, folder: Path, tmp_path: Path) -> None:
    def predict(reads: object, **settings: object) -> None:
        out = settings.pop("out", tmp_path / "out")
        virnuc.predict(reads, out=out, models=folder / "models", devices="cpu:1", **settings)

    first, second = (str(folder / "pairs" / f"sample_R{mate}.fastq") for mate in "12")
    with pytest.raises(ConfigError) as error_info:
        predict(first, treshold=0.9)
    assert str(error_info.value) == (
        "treshold: there is no such setting, did you mean threshold? (given 0.9)"
    )
    with pytest.raises(ConfigError, match=r"^mates_1 names 1 files, mates_2 0; name both of each"):
        predict((), mates_1=(first,))
    with pytest.raises(InputError) as input_error:
        predict((), mates_1=(first,), mates_2=(first,))
    assert str(input_error.value) == (
        f"mates_1 and mates_2 name the same file, {first}; "
        f"mates_2 takes the second mates (is it {second}?)"
    )
    with pytest.raises(RunMismatchError, match=r"choose another directory or force=True$"):
        predict(folder / "reads.fastq", out=run.folder, engine=ENGINE)


def test_options_that_are_part_of_a_name_stay() -> None:
    message = "a--force, b-1, -1, --no-pairs; --fdr and --abstain, --head; -12"
    assert _name_arguments(message) == (
        "a--force, b-1, mates_1, pairs=False; fdr and abstain=True, --head; -12"
    )


def test_anndata_has_frames_with_their_reads(run: virnuc.Run) -> None:
    pytest.importorskip("anndata", reason="pip install -e '.[anndata]'")
    data = run.to_anndata()
    assert data.X.shape[0] == len(run.frames)
    first_read = run.reads.set_index("id").loc[data.obs["read"].iloc[0]]
    assert data.obs["length"].iloc[0] == first_read["length"]


def test_without_anndata_the_message_names_the_checkout(
    run: virnuc.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "anndata", None)  # the import then fails
    with pytest.raises(ConfigError, match=r"needs the package anndata.*'\.\[anndata\]'"):
        run.to_anndata()


def test_importing_virnuc_imports_nothing_heavy() -> None:
    code = "import sys, virnuc; print(sorted({'torch', 'pandas', 'prefect'} & sys.modules.keys()))"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout == "[]\n"
