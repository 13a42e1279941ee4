"""A file is read only if it is as it was written, whichever bit was changed."""

from __future__ import annotations

import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import h5py
import numpy as np
import pytest

from virnuc_core.checked_files import (
    OWN_DIGEST_FIELD,
    PAGE_DIGEST,
    SEAL_BYTES,
    Match,
    RecordedSha256,
    Seal,
    array_bytes,
    compare_text,
    has_own_digest,
    open_checked,
    open_checked_hdf5,
    read_checked_array,
    read_checked_json,
    with_own_digest,
    with_page_digest,
)
from virnuc_core.encoders import digests
from virnuc_core.encoders.digests import part_digest
from virnuc_core.errors import ConfigError, DamagedFileError, InputError, UnsafeFileError
from virnuc_core.rundir import RunDir, atomic_hdf5
from virnuc_core.runfiles import (
    ListedFiles,
    RunSummary,
    changed_files,
    digest,
    listed_digest,
    read,
    read_or_set_aside,
    write,
)
from virnuc_core.telemetry.journal import journal
from virnuc_core.telemetry.log import read_journal

SUMMARY = RunSummary(n_reads=7, wall_s=1e5, fates={"viral": 3, "others": 4}, warnings=("a – b",))
SEAL = Seal("test 1")


def flipped(content: bytes, place: int, bit: int) -> bytes:
    """Return the content with one bit of the byte at `place` flipped."""
    damaged = bytearray(content)
    damaged[place] ^= 1 << bit
    return bytes(damaged)


def test_every_bit_of_a_page_counts(tmp_path: Path) -> None:
    """Also those of the comment that holds the digest."""
    path = tmp_path / "summary.html"
    content = with_page_digest("<p>7 of 8</p>\n").encode()
    for place in range(len(content)):
        for bit in range(8):
            path.write_bytes(flipped(content, place, bit))
            with pytest.raises(DamagedFileError, match="its last line has another digest"):
                open_checked(path, PAGE_DIGEST)
    path.write_bytes(content)
    with open_checked(path, PAGE_DIGEST) as file:
        assert file.read() == content
    path.write_bytes(b"<p>7 of 8</p>\n")  # of an older version
    open_checked(path, PAGE_DIGEST).close()


def test_every_bit_of_a_json_file_counts(tmp_path: Path) -> None:
    """Also those of white space, of the digest, and of the name of its field."""
    path = write(tmp_path / "summary.json", SUMMARY)
    content = path.read_bytes()
    assert read(path, RunSummary) == SUMMARY
    assert has_own_digest(path)
    for place in range(len(content)):
        # Each bit of the digest and of its name, and one bit of each other byte.
        is_last_field = place > content.rindex(b",\n")
        for bit in range(8) if is_last_field else [place % 8]:
            path.write_bytes(flipped(content, place, bit))
            with pytest.raises(ConfigError, match=r"summary\.json"):
                read(path, RunSummary)


def test_a_json_file_of_an_older_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text(SUMMARY.model_dump_json(indent=1) + "\n")
    assert read(path, RunSummary) == SUMMARY
    assert not has_own_digest(path)


def test_the_digest_is_that_of_the_text_before_it(tmp_path: Path) -> None:
    """As `head -n -2 summary.json | head -c -2 | sha256sum` computes it."""
    lines = write(tmp_path / "summary.json", SUMMARY).read_text().splitlines(keepends=True)
    text = "".join(lines[:-2]).removesuffix(",\n")
    recorded = json.loads("".join(lines))[OWN_DIGEST_FIELD]
    assert hashlib.sha256(text.encode()).hexdigest() == recorded


def test_an_edited_json_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = write(tmp_path / "summary.json", SUMMARY)
    body = json.loads(path.read_text())
    path.write_text(json.dumps(body | {"n_reads": 8}))
    with pytest.raises(DamagedFileError, match=f"remove its field {OWN_DIGEST_FIELD}$"):
        read(path, RunSummary)
    del body[OWN_DIGEST_FIELD]
    path.write_text(json.dumps(body | {"n_reads": 8}))
    assert read(path, RunSummary).n_reads == 8


def test_a_damaged_record_is_set_aside_and_an_absent_one_is_not(tmp_path: Path) -> None:
    path = write(tmp_path / "summary.json", SUMMARY)
    content = flipped(path.read_bytes(), 20, 0)
    path.write_bytes(content)
    assert read_or_set_aside(path, RunSummary) is None
    assert (tmp_path / "summary.json.damaged").read_bytes() == content
    assert read_or_set_aside(path, RunSummary) is None
    with pytest.raises(FileNotFoundError):
        read_checked_json(path)


def test_a_small_json_object_may_be_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(with_own_digest('{"bounds": [0, 3]}'))
    assert json.loads(read_checked_json(path)) == {"bounds": [0, 3]}


def test_every_byte_of_a_listed_file_counts(tmp_path: Path) -> None:
    table = tmp_path / "reads.tsv"
    table.write_bytes(b"id\tfate\nr1\tviral\n")
    recorded = digest(table)
    assert recorded is not None
    write(tmp_path / "summary.json", ListedFiles(files={"reads.tsv": recorded}))
    assert listed_digest(table) == recorded
    content = table.read_bytes()
    for damaged in (flipped(content, 3, 2), content[:-1], content + b"x", b""):
        table.write_bytes(damaged)
        with pytest.raises(InputError, match=r"reads\.tsv: is not as the run left it"):
            open_checked(table, listed_digest(table))
        assert changed_files(tmp_path, {"reads.tsv": recorded}) == ["reads.tsv"]
    table.unlink()
    assert changed_files(tmp_path, {"reads.tsv": recorded}) == ["reads.tsv"]
    with pytest.raises(FileNotFoundError):
        open_checked(table, recorded)


@pytest.mark.timeout(20)
def test_a_huge_file_in_the_place_of_a_small_one_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with atomic_hdf5(path, SEAL.seal_of, userblock_size=SEAL_BYTES) as file:
        file["x"] = [1]
    recorded = digest(path)
    with path.open("wb") as huge:
        huge.truncate(1 << 40)
    with pytest.raises(DamagedFileError):
        open_checked(path, recorded)
    with pytest.raises(DamagedFileError):
        open_checked_hdf5(path, SEAL)
    with pytest.raises(UnsafeFileError, match="more than"):
        read_checked_json(path)


def test_every_byte_of_a_sealed_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with atomic_hdf5(path, SEAL.seal_of, userblock_size=SEAL_BYTES) as file:
        file["x"] = np.arange(5)
    content = path.read_bytes()
    with open_checked_hdf5(path, SEAL) as file:
        assert file["x"][:].tolist() == [0, 1, 2, 3, 4]
    with h5py.File(path) as file:  # other programs skip the seal
        assert file["x"][:].tolist() == [0, 1, 2, 3, 4]
    for place in range(0, len(content), 7):
        path.write_bytes(flipped(content, place, place % 8))
        with pytest.raises(DamagedFileError, match=r"x\.h5"):
            open_checked_hdf5(path, SEAL)


def test_a_file_without_a_seal_is_of_an_older_version_if_that_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = [1]
    with pytest.raises(DamagedFileError):
        open_checked_hdf5(path, SEAL)
    with open_checked_hdf5(path, Seal("test 1", is_optional=True)) as file:
        assert file["x"][0] == 1


def test_every_bit_of_an_array_counts(tmp_path: Path) -> None:
    path = tmp_path / "scores.npy"
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    content = array_bytes(array)
    path.write_bytes(content)
    assert np.array_equal(read_checked_array(path, max_bytes=1_000), array)
    assert np.array_equal(np.load(path), array), "other programs ignore the digest"
    for place in range(len(content)):
        path.write_bytes(flipped(content, place, place % 8))
        with pytest.raises(DamagedFileError, match=r"scores\.npy"):
            read_checked_array(path, max_bytes=1_000)
    np.save(path, array)  # as older versions did
    assert np.array_equal(read_checked_array(path, max_bytes=1_000), array)
    with pytest.raises(UnsafeFileError, match="more than"):
        read_checked_array(path, max_bytes=100)


def test_a_file_is_compared_with_what_its_writer_said(tmp_path: Path) -> None:
    path = tmp_path / "00001_protein.fa"
    path.write_bytes(b">a\nMK\n")
    recorded = RecordedSha256(hashlib.sha256(b">a\nMK\n").hexdigest())
    open_checked(path, recorded).close()
    path.write_bytes(b">a\nMR\n")
    with pytest.raises(DamagedFileError):
        open_checked(path, recorded)


def test_a_damaged_line_of_a_journal_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "attempt.jsonl"
    with journal(path, 5.0, datetime(2026, 1, 1, tzinfo=UTC), ["cpu-core-0"]) as add:
        for number in range(3):
            add(f"worker {number} died")
    lines = path.read_bytes().splitlines(keepends=True)
    complete = read_journal(path)
    assert complete is not None
    assert complete.deaths == ("worker 0 died", "worker 1 died", "worker 2 died")
    for place in range(len(lines[2])):
        caplog.clear()
        path.write_bytes(lines[0] + lines[1] + flipped(lines[2], place, 0) + lines[3])
        damaged = read_journal(path)
        assert damaged is not None
        assert "worker 1 died" not in damaged.deaths
        assert "attempt.jsonl" in caplog.text
    caplog.clear()
    path.write_bytes(b"".join(lines)[:-9])  # a killed process leaves the last line incomplete
    cut_off = read_journal(path)
    assert cut_off is not None
    assert cut_off.deaths == ("worker 0 died", "worker 1 died")
    assert not caplog.records


def test_a_damaged_digest_in_the_cache_is_computed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(digests, "CACHE", str(cache))
    monkeypatch.setattr(digests, "LARGE_BYTES", 1)
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(100)))
    true_digest = part_digest(folder)
    entries = [path for path in cache.iterdir() if len(path.name) == 64]
    assert len(entries) == 2
    for entry in entries:
        content = entry.read_bytes()
        for bit in (0, 1):
            digits = flipped(content, 5, bit)
            entry.write_bytes(digits)
            digests._cached_digest.cache_clear()
            assert part_digest(folder) == true_digest
            assert entry.read_bytes() == content, "it is written again"


def test_no_digest_is_needed_to_say_that_a_file_is_no_regular_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "reads.tsv")
    with pytest.raises(UnsafeFileError, match="named pipe"):
        open_checked(tmp_path / "reads.tsv", None)
    assert listed_digest(RunDir(tmp_path).reads_table) is None


def test_a_text_is_compared_with_the_letters_that_were_written_with_it() -> None:
    """The SHA-256 of "abc" is an example of the standard (FIPS 180-4)."""
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert compare_text(b"abc", sha256) is Match.SAME
    assert compare_text(b"abc", sha256[:16], 16) is Match.SAME
    assert compare_text(b"abc", None) is Match.NOT_RECORDED
    for other in ("", sha256[:16], sha256[:-1], sha256.upper(), sha256 + "0"):
        assert compare_text(b"abc", other) is Match.CHANGED
    assert compare_text(b"abd", sha256) is Match.CHANGED
