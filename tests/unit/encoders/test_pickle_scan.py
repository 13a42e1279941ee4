"""Pickles that keep a loader busy are refused within seconds, and those of models are not."""

from __future__ import annotations

import io
import pickle
import time
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from virnuc_core.encoders.convert import convert_encoder
from virnuc_core.encoders.pickle_scan import MAX_INSTRUCTIONS, check_checkpoint
from virnuc_core.encoders.pickles import read_pickled
from virnuc_core.encoders.registry import PROTEIN_ENCODER
from virnuc_core.errors import WeightsError

MILLIONS = 3_000_000
MAX_S = 10.0  # of the processor; torch alone takes 4 to 45 s for three million instructions
LEGACY = b"\x80\x02"  # protocol 2, as torch writes it


def nested_tuples(depth: int) -> bytes:
    """Instructions for a tuple of two equal tuples of two equal tuples, and so on."""
    instructions = b"N"
    for key in range(depth):
        instructions += b"q%ch%c\x86" % (key, key)  # keep it, take it again, join both
    return instructions


def ordered_dict_of(key: bytes) -> bytes:
    """Instructions that call `OrderedDict([(key, None)])`, which computes the hash of the key."""
    return b"ccollections\nOrderedDict\n]" + key + b"N\x86a\x85R"


BUSY = {
    "marks": b"(" * MILLIONS,
    "marks closed": b"(" * (MILLIONS // 2) + b"t" * (MILLIONS // 2),
    "nothings": b"N" * MILLIONS,
    "tuples within tuples": b"N" + b"\x85" * MILLIONS,
    "small numbers": b"K\x01" * MILLIONS,
    "a list": b"](" + b"N" * MILLIONS + b"e",
    "equal tuples as a key": b"}" + nested_tuples(60) + b"Ns",
    "equal tuples as keys": b"}(" + nested_tuples(60) + b"Nu",
    "equal tuples as a key of an object": ordered_dict_of(nested_tuples(60)),
    "numbers of one hash": b"}("
    + b"".join(
        b"\x8a\x09" + (k * (2**61 - 1)).to_bytes(9, "little", signed=True) + b"N"
        for k in range(1, 1_000)
    )
    * 200
    + b"u",
}


def write_checkpoint(path: Path, instructions: bytes, *, as_zip: bool) -> Path:
    """Write instructions where torch looks for them: in an archive, or in its old format."""
    if not as_zip:
        path.write_bytes(LEGACY + instructions + b".")
        return path
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer)
    with zipfile.ZipFile(buffer) as saved, zipfile.ZipFile(path, "w") as archive:
        for name in saved.namelist():
            content = saved.read(name)
            if name.endswith("data.pkl"):
                content = LEGACY + instructions + b"."
            archive.writestr(name, content)
    return path


def busy_checkpoints() -> list[ParameterSet]:
    """Return the parameters of each kind of pickle, in an archive and in torch's old format.

    The same loop looks through both formats. So a kind of each message is enough for the quick
    tests of the old format.
    """
    parameters = []
    for name in BUSY:
        parameters.append(pytest.param(name, True, id=f"{name}-archive"))
        marks = []
        if name not in ("marks", "equal tuples as a key", "numbers of one hash"):
            marks.append(pytest.mark.slow)
        parameters.append(pytest.param(name, False, id=f"{name}-old format", marks=marks))
    return parameters


@pytest.mark.parametrize(("name", "as_zip"), busy_checkpoints())
def test_a_pickle_that_keeps_its_loader_busy_is_refused_within_seconds(
    name: str, as_zip: bool, tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path / "500_model.pth", BUSY[name], as_zip=as_zip)
    started_s = time.process_time()
    with pytest.raises(WeightsError, match=r"more than [\d,]+ (instructions|large)|a tuple of"):
        read_pickled(path)
    assert time.process_time() - started_s < MAX_S


def test_an_encoder_is_refused_as_a_head_is(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "esm2.pt", BUSY["marks"], as_zip=True)
    with pytest.raises(WeightsError, match="instructions, which no model has"):
        convert_encoder(PROTEIN_ENCODER, source, tmp_path / "models")


def test_the_name_in_the_archive_does_not_hide_a_pickle(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "500_model.pth", BUSY["marks"], as_zip=True)
    hidden = tmp_path / "hidden.pth"
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(hidden, "w") as renamed:
        for name in archive.namelist():
            renamed.writestr(name.replace("data.pkl", "DATA.PKL"), archive.read(name))
    with pytest.raises(ValueError, match="instructions"):
        check_checkpoint(hidden, is_zip=True)


@pytest.mark.parametrize("as_zip", [True, False], ids=["archive", "old format"])
def test_a_checkpoint_four_times_the_size_of_the_largest_esm2_is_read(
    as_zip: bool, tmp_path: Path
) -> None:
    state = OrderedDict(
        (f"encoder.layers.{layer}.module_{number}.weight", torch.full((2, 2), float(layer)))
        for layer in range(192)
        for number in range(16)
    )
    path = tmp_path / "large.pt"
    torch.save({"model": state}, path, _use_new_zipfile_serialization=as_zip)
    tensors = read_pickled(path)
    assert tensors.keys() == state.keys()
    assert torch.equal(tensors["encoder.layers.7.module_3.weight"], torch.full((2, 2), 7.0))


@pytest.mark.parametrize(
    "instructions", [b"0", b"h\x05", b"t", b"\x86", b"s", b"\xff", b"X\xff\xff\xff\xff"]
)
def test_a_damaged_pickle_is_refused_in_one_line(instructions: bytes, tmp_path: Path) -> None:
    path = tmp_path / "500_model.pth"
    path.write_bytes(LEGACY + instructions)
    with pytest.raises(WeightsError, match=r"500_model\.pth: refused, [^\n]+$"):
        read_pickled(path)


def test_the_limit_is_far_above_what_python_itself_pickles(tmp_path: Path) -> None:
    values = {f"tensor {number}": (number, (number, 1), "cpu") for number in range(1_000)}
    path = tmp_path / "plain.pkl"
    path.write_bytes(pickle.dumps(values, protocol=2) * 5)
    check_checkpoint(path, is_zip=False)
    assert len(values) * 100 < MAX_INSTRUCTIONS
