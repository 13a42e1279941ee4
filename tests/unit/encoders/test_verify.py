"""Checking a models directory, and fetching the public one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from Bio.Seq import Seq
from safetensors.torch import load_file, save_file

from tests.damage import flip_bit
from tests.unit.tiny_calibration import write_calibration
from virnuc_core.encoder_names import EncoderName
from virnuc_core.encoders import verify as verifying
from virnuc_core.encoders.convert import fetch
from virnuc_core.encoders.digests import fingerprint
from virnuc_core.encoders.registry import DNABERT_S, ENCODERS, ESM2
from virnuc_core.encoders.tokenize import Esm2Tokenizer
from virnuc_core.encoders.verify import REFERENCE_ROWS, check_reference_row, verify
from virnuc_core.errors import WeightsError

CPU = torch.device("cpu")


@pytest.fixture
def copied(models: Path, tmp_path: Path) -> Path:
    shutil.copytree(models, tmp_path / "models")
    return tmp_path / "models"


def test_sound_random_weights_pass_and_anchors_do_not_run(models: Path) -> None:
    checks = {check.name: check for check in verify(models, CPU)}
    prints = fingerprint(models)
    assert checks["esm2 sha256"].detail == prints["esm2"]
    assert checks["head sha256"].detail == prints["head"]
    assert [checks[part].verdict for part in ("esm2", "dnabert_s", "head")] == ["ok"] * 3
    assert checks["esm2"].detail.endswith("random, seed 7")
    assert (checks["anchors"].verdict, checks["anchors"].detail) == ("not run", "random weights")
    assert checks["trust"].verdict == "warn"
    assert "ESM-2, DNABERT-S and the classifier are random" in checks["trust"].detail


def test_not_a_number_is_a_fail_that_names_the_tensor(copied: Path) -> None:
    path = copied / "dnabert_s" / "model.safetensors"
    tensors = load_file(path)
    tensors["layers.1.wo.bias"][3] = torch.inf
    save_file(tensors, path)
    checks = {check.name: check for check in verify(copied, CPU)}
    assert checks["dnabert_s"].verdict == "fail"
    assert "layers.1.wo.bias holds NaN or infinity" in checks["dnabert_s"].detail
    assert checks["esm2"].verdict == "ok"
    assert checks["anchors"].verdict == "not run"


def calibration_check(models: Path) -> verifying.Check:
    (check,) = [check for check in verify(models, CPU) if "calibration" in check.name]
    return check


def test_the_calibration_is_checked_too(copied: Path) -> None:
    path = write_calibration(copied)
    assert calibration_check(copied).verdict == "ok"
    # The lowest bit of the last number: no rule about the numbers can see it.
    flip_bit(path, place=-4, bit=0)
    damaged = calibration_check(copied)
    assert damaged.verdict == "fail"
    assert "is no calibration for this" in damaged.detail


def test_a_calibration_for_other_weights_is_a_fail(copied: Path) -> None:
    write_calibration(copied)
    path = copied / "esm2" / "model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    tensors[name] = tensors[name] + 1
    save_file(tensors, path)
    check = calibration_check(copied)
    assert (check.verdict, check.detail.partition(";")[0]) == (
        "fail",
        f"was made for other weights of {ESM2.title}",
    )


def test_a_missing_part_is_a_fail(copied: Path) -> None:
    shutil.rmtree(copied / "head")
    assert [check.verdict for check in verify(copied, CPU)] == ["ok", "ok", "fail", "not run"]


def test_other_weights_than_the_public_ones_leave_the_anchors_out(copied: Path) -> None:
    for part in ("esm2", "dnabert_s", "head"):
        path = copied / part / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"origin": "elsewhere"}))
    assert verify(copied, CPU)[-1].detail == "not ESM-2 3B and DNABERT-S"


def test_anchors_run_where_the_sizes_fit_and_fail_for_other_numbers(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny models put in place of the public sizes: the whole path runs, and wrong weights are found out."""
    for part in ("esm2", "dnabert_s", "head"):
        path = copied / part / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"origin": "elsewhere"}))
    tiny_encoders = tuple(replace(encoder, reference_size="tiny") for encoder in ENCODERS)
    monkeypatch.setattr(verifying, "ENCODERS", tiny_encoders)
    anchors = [check for check in verify(copied, CPU) if check.name.startswith("anchor")]
    assert [check.name for check in anchors] == [f"anchor {row.name}" for row in REFERENCE_ROWS]
    assert {check.verdict for check in anchors} == {"fail"}


def test_a_reference_row_passes_for_its_own_numbers_only() -> None:
    row = REFERENCE_ROWS[0]

    def embedding(name: EncoderName) -> torch.Tensor:
        """A vector with the norm and the first entry that are expected."""
        norm, first_value = row.embeddings[name].norm, row.embeddings[name].first_entry
        return torch.tensor([first_value, (norm**2 - first_value**2) ** 0.5])

    dna, protein = embedding("dnabert_s"), embedding("esm2")
    scores = torch.tensor([1 - row.viral_score, row.viral_score])

    def verdict(dna: torch.Tensor, protein: torch.Tensor, scores: torch.Tensor) -> str:
        embeddings: dict[EncoderName, torch.Tensor] = {"dnabert_s": dna, "esm2": protein}
        return check_reference_row(row, embeddings, scores).verdict

    assert verdict(dna, protein, scores) == "ok"
    assert verdict(dna * 1.001, protein, scores) == "fail"
    assert verdict(dna, protein.flip(0), scores) == "fail"
    assert verdict(dna, protein, scores.flip(0)) == "fail"


def test_reference_rows_are_frames_without_a_stop() -> None:
    proteins = [row.embeddings["esm2"].sequence for row in REFERENCE_ROWS]
    assert proteins[0] == "LFRRFFRRFQFRNRFFRRFNRFTFRRHRFRRFFNRFCQFCTFFNRFFQFCNTFTFASH"
    for row, protein in zip(REFERENCE_ROWS, proteins, strict=True):
        dna = row.embeddings["dnabert_s"].sequence
        whole_codons = dna[: len(dna) // 3 * 3]
        assert protein == str(Seq(whole_codons).translate())  # type: ignore[no-untyped-call]
        tokens, _ = Esm2Tokenizer().encode([protein.encode()])
        assert (tokens[1:-1] >= 4).all()


@pytest.fixture
def head_file(models: Path, tmp_path: Path) -> Path:
    """A head of the public widths, as VirNucPro saves its state."""
    state = load_file(models / "head" / "model.safetensors")
    state["hidden_layer.weight"] = torch.randn(512, 768 + 64)
    torch.save(state, tmp_path / "500_model.pth")
    return tmp_path / "500_model.pth"


def test_fetch_downloads_pinned_revisions_and_converts_them(
    models: Path, head_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = []

    def download(repository: str, *, revision: str, allow_patterns: list[str]) -> str:
        assert not any("py" in pattern.split(".")[-1] for pattern in allow_patterns)
        requests.append((repository, revision))
        return str(models / ("esm2" if "esm2" in repository else "dnabert_s"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    fetch(tmp_path / "out", head_file)
    published_encoders = [encoder.public for encoder in (DNABERT_S, ESM2)]
    assert requests == [(weights.repository, weights.revision) for weights in published_encoders]
    assert all(len(revision) == 40 for _, revision in requests)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "dnabert_s",
        "esm2",
        "head",
    ]
    fetch(tmp_path / "out", head_file)
    assert len(requests) == 2  # what is there is not fetched again


def test_fetch_without_a_network_is_one_clear_line(
    head_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def refuse(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("Cannot reach the hub\nand more lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(
        WeightsError, match=r"cannot be downloaded \(Cannot reach the hub\); without a network"
    ) as error_info:
        fetch(tmp_path / "out", head_file)
    assert "\n" not in str(error_info.value)


def test_fetch_without_a_head_says_where_heads_come_from(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="come with VirNucPro's repository"):
        fetch(tmp_path / "out", tmp_path / "500_model.pth")
    assert not (tmp_path / "out").exists()
