"""The calibration file of int8: equal calibrations have equal bytes and digests, old files count."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from virnuc_core import pipeline
from virnuc_core.config import ClassifySpec, Devices, EngineSpec
from virnuc_core.encoders.calibration import (
    STATISTICS_DIGEST,
    calibration_digest,
    canonical_bytes,
    is_older_digest,
    read_calibration,
    statistics_digest,
)
from virnuc_core.encoders.digests import accept_older_digest, fingerprint, part_digest
from virnuc_core.encoders.model_config import ESM2_SIZES, PRODUCTS
from virnuc_core.errors import RunMismatchError, WeightsError
from virnuc_core.reads.simulate import SimulateSpec, simulate
from virnuc_core.reads.stage import StageSpec, stage
from virnuc_core.rundir import RunDir

# The library orders two keys at random, anew each time: by chance all have one order once in 2 ** 15
# times.
N_PROCESSES = 2
N_WRITTEN = 8  # by each process
# What `quantise` does at its end, and what it did before. Argument: how many times
WRITER = """
import hashlib, sys
import numpy as np
from safetensors.numpy import save
from virnuc_core.encoders.calibration import canonical_bytes
tensors = {f"layers.0.{name}": np.ones((2, 4), np.float32) for name in ("qkv", "out", "up")}
for _ in range(int(sys.argv[1])):
    content = save(tensors, {"weights": "5eed", "rows": "4096"})
    print(hashlib.sha256(content).hexdigest(), hashlib.sha256(canonical_bytes(content)).hexdigest())
"""


def test_equal_calibrations_have_equal_bytes_in_many_processes() -> None:
    library_digests, our_digests = set(), set()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(N_WRITTEN)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(N_PROCESSES)
    ]
    for process in processes:
        for line in process.communicate(timeout=120)[0].splitlines():
            library_digest, our_digest = line.split()
            library_digests.add(library_digest)
            our_digests.add(our_digest)
    assert len(our_digests) == 1
    assert our_digests < library_digests, "and they are bytes that older versions may have written"


def content_of(models: Path, *, scale: float = 1.0, with_digest: bool = False) -> bytes:
    """The calibration of the tiny ESM-2, as the library writes it; of today with a digest."""
    shape = ESM2_SIZES["tiny"]
    widths = dict.fromkeys(PRODUCTS, shape.width) | {"down": shape.ffn_width}
    tensors = {
        f"layers.{layer}.{name}": np.full((2, width), scale, np.float32)
        for layer in range(shape.layers)
        for name, width in widths.items()
    }
    metadata = {"weights": part_digest(models / "esm2"), "rows": "300"}
    if with_digest:
        metadata[STATISTICS_DIGEST] = statistics_digest(tensors)
    return save(tensors, metadata)


def test_every_byte_of_a_calibration_counts(calibrated: Path) -> None:
    """A damaged file is refused. Only the number of proteins, which nothing is computed from, may
    change, and then the digest of the calibration is another one.
    """
    path = calibrated / "esm2/int8.safetensors"
    content = canonical_bytes(content_of(calibrated, with_digest=True))
    path.write_bytes(content)
    true_digest = fingerprint(calibrated, "int8")["int8"]
    header_length = 8 + int.from_bytes(content[:8], "little")
    places = [*range(header_length), *range(header_length, len(content), 997)]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        try:
            assert fingerprint(calibrated, "int8")["int8"] != true_digest, place
        except WeightsError as error:
            assert "int8.safetensors" in str(error)  # noqa: PT017 - it is not always raised


def both_orders(content: bytes) -> list[bytes]:
    """The content with its metadata in either order, by the format's description."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__")
    orders = []
    for keys in itertools.permutations(metadata):
        ordered = {"__metadata__": {key: metadata[key] for key in keys}, **header}
        text = json.dumps(ordered, separators=(",", ":")).encode().ljust(length)
        orders.append(content[:8] + text + content[8 + length :])
    return orders


@pytest.fixture
def calibrated(models: Path, tmp_path: Path) -> Path:
    """The tiny models, to which a calibration may be written."""
    return shutil.copytree(models, tmp_path / "models")


def test_a_file_of_an_older_version_is_read_and_has_the_digest_of_its_content(
    calibrated: Path,
) -> None:
    path = calibrated / "esm2/int8.safetensors"
    contents = both_orders(content_of(calibrated))
    assert len(set(contents)) == 2
    digests = set()
    for content in contents:
        path.write_bytes(content)
        assert read_calibration(calibrated).weights == part_digest(calibrated / "esm2")
        assert load(canonical_bytes(content)).keys() == load(content).keys()
        digests.add(fingerprint(calibrated, "int8")["int8"])
        assert digests == {calibration_digest(path)}
        for other in contents:
            assert is_older_digest(hashlib.sha256(other).hexdigest(), path)
    path.write_bytes(canonical_bytes(content))
    assert digests == {hashlib.sha256(path.read_bytes()).hexdigest()}


def test_a_digest_of_an_older_version_is_accepted_for_the_same_calibration_only(
    calibrated: Path,
) -> None:
    path = calibrated / "esm2/int8.safetensors"
    contents = both_orders(content_of(calibrated))
    other_contents = both_orders(content_of(calibrated, scale=2.0))
    path.write_bytes(contents[0])
    digests = fingerprint(calibrated, "int8")
    for content in contents:
        recorded = {**digests, "int8": hashlib.sha256(content).hexdigest()}
        assert accept_older_digest(calibrated, digests, recorded) == recorded
    for content in other_contents:
        recorded = {**digests, "int8": hashlib.sha256(content).hexdigest()}
        assert accept_older_digest(calibrated, digests, recorded) == digests
    without_int8 = {name: digest for name, digest in digests.items() if name != "int8"}
    assert accept_older_digest(calibrated, without_int8, digests) == without_int8
    assert accept_older_digest(calibrated, digests, {}) == digests


def test_an_unfinished_run_of_an_older_version_goes_on_after_the_same_calibration_was_made_again(
    calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is no int8 on a CPU. Only the plan is made here, and nothing is computed.
    monkeypatch.setattr(pipeline, "resolve_engine", lambda engine, kind: engine)
    path = calibrated / "esm2/int8.safetensors"
    newer, older = sorted(
        both_orders(content_of(calibrated)), key=lambda content: content != canonical_bytes(content)
    )
    simulate(SimulateSpec(reads=50, seed=3), tmp_path / "reads.fasta")
    staging = StageSpec(reads=(str(tmp_path / "reads.fasta"),), model_length=500)
    store = stage(staging, tmp_path / "orfs.h5").store
    spec = ClassifySpec(
        models=calibrated, devices=Devices.parse("cpu:1"), engine=EngineSpec(precision="int8")
    )
    run = RunDir(tmp_path / "run")

    path.write_bytes(older)
    with monkeypatch.context() as patch:  # what the older version computed as the digest
        old_digest = hashlib.sha256(older).hexdigest()
        patch.setattr("virnuc_core.encoders.digests.calibration_digest", lambda _: old_digest)
        pipeline.prepare(run, Path(store), spec)
    record = json.loads(run.record.read_text())
    assert record["fingerprints"]["int8"] == old_digest

    path.write_bytes(newer)
    pipeline.prepare(run, Path(store), spec)
    assert json.loads(run.record.read_text())["fingerprints"] == record["fingerprints"]

    path.write_bytes(canonical_bytes(content_of(calibrated, scale=2.0)))
    with pytest.raises(RunMismatchError, match="int8"):
        pipeline.prepare(run, Path(store), spec)


def test_a_calibration_of_today_stands_for_the_same_one_without_its_digest(
    calibrated: Path,
) -> None:
    path = calibrated / "esm2/int8.safetensors"
    path.write_bytes(canonical_bytes(content_of(calibrated, with_digest=True)))
    digests = fingerprint(calibrated, "int8")
    assert digests["int8"] == hashlib.sha256(path.read_bytes()).hexdigest()
    for content in both_orders(content_of(calibrated)):
        recorded = {**digests, "int8": hashlib.sha256(content).hexdigest()}
        assert accept_older_digest(calibrated, digests, recorded) == recorded
    for content in both_orders(content_of(calibrated, scale=2.0)):
        recorded = {**digests, "int8": hashlib.sha256(content).hexdigest()}
        assert accept_older_digest(calibrated, digests, recorded) == digests


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0[1, 2]  ", b"\xff" * 100])
def test_what_is_no_calibration_is_refused_in_one_line(calibrated: Path, content: bytes) -> None:
    (calibrated / "esm2/int8.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match="is no calibration for this ESM-2"):
        fingerprint(calibrated, "int8")
    with pytest.raises(ValueError):  # noqa: PT011 - of whatever JSON says
        canonical_bytes(content)
