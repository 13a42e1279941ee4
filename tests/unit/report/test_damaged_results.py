"""One flipped bit in any file of a finished run, and what reads the file again says so."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import h5py
import pytest

from tests.damage import flip_bit
from virnuc_core.config import RunSpec
from virnuc_core.encoders.convert import init_random
from virnuc_core.engine.shards import shard_path
from virnuc_core.errors import VirnucError
from virnuc_core.pipeline import predict
from virnuc_core.report.raw_files import RawFolder
from virnuc_core.report.verification import Verification
from virnuc_core.report.verify_runs import verify_results
from virnuc_core.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]
RUN_NAME = "devices-1"  # as a validation names the folder of its first run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is laid out like a validation: a finished run, and the store beside it."""
    folder = tmp_path_factory.mktemp("damage")
    dice = random.Random(11)
    reads = folder / "reads.fasta"
    reads.write_text(
        "".join(f">read{i}\n{''.join(dice.choices('ACGT', k=300))}\n" for i in range(40))
    )
    models = folder / "models"
    init_random(models, model_length=300, seed=5)
    out_dir = folder / "validation" / RUN_NAME
    predict(RunSpec(reads=(str(reads),), models=models, devices="cpu:1", out=out_dir))
    shutil.copy2(out_dir / "orfs.h5", folder / "validation" / "orfs.h5")
    return folder / "validation"


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "validation"))


def verify(folder: Path) -> Verification:
    verification = Verification()
    verify_results(verification, RawFolder(folder), RUN_NAME)
    return verification


def test_an_untouched_run_is_verified(copied: Path) -> None:
    verification = verify(copied)
    assert verification.differences == []
    assert verification.remarks == []
    assert verification.ok


def test_a_flipped_bit_in_an_embedding_is_a_difference(copied: Path) -> None:
    path = shard_path(RunDir(copied / RUN_NAME), 0)
    with h5py.File(path) as file:
        place = file["embeddings"].id.get_offset()
    flip_bit(path, place=place + 40)
    assert verify(copied).differences == [
        f"{RUN_NAME}/shards/00000.h5: has other bytes than were committed"
    ]


@pytest.mark.parametrize(
    "name",
    [
        "prediction_results.txt",
        "prediction_results_highestscore.csv",
        "reads.tsv",
        "shards/00000.h5",
        "shards/plan.json",
    ],
)
def test_a_flipped_bit_never_goes_unseen(copied: Path, name: str) -> None:
    """It is a difference, or the file is refused."""
    path = copied / RUN_NAME / name
    for place in (path.stat().st_size // 2, -20):
        original = path.read_bytes()
        flip_bit(path, place=place, bit=0)
        try:
            differences = verify(copied).differences
        except VirnucError as error:
            differences = [str(error)]
        assert differences, f"byte {place} of {name}"
        path.write_bytes(original)
