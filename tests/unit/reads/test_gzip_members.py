"""gzip files of several members: wherever a header lies, and whatever follows the last member."""

from __future__ import annotations

import bz2
import gzip
import struct
import zlib
from pathlib import Path

import pytest

from virnuc_core.errors import InputError
from virnuc_core.reads.sources import _PIECE_BYTES, Source

from .made_up import pack_with

FLAG_CRC, FLAG_EXTRA, FLAG_NAME, FLAG_COMMENT = 2, 4, 8, 16
HEADERS = {
    "crc": (FLAG_CRC, b""),
    "extra": (FLAG_EXTRA, struct.pack("<H", 300) + b"x" * 300),
    "name": (FLAG_NAME, b"a name of a file.fastq\0"),
    "comment": (FLAG_COMMENT, b"a comment\0"),
    "all": (
        FLAG_EXTRA | FLAG_NAME | FLAG_COMMENT | FLAG_CRC,
        struct.pack("<H", 60_000) + b"y" * 60_000 + b"name\0comment\0",
    ),
}


def member(content: bytes, header: str = "") -> bytes:
    """Return one gzip member, stored without compression, with the optional fields of a header."""
    flags, fields = HEADERS.get(header, (0, b""))
    head = b"\x1f\x8b\x08" + bytes([flags]) + bytes(5) + b"\x03" + fields
    if flags & FLAG_CRC:
        head += struct.pack("<H", zlib.crc32(head) & 0xFFFF)
    packer = zlib.compressobj(0, zlib.DEFLATED, -15)
    packed = packer.compress(content) + packer.flush()
    return head + packed + struct.pack("<II", zlib.crc32(content), len(content) & 0xFFFFFFFF)


def read_all(path: Path) -> tuple[bytes, InputError | None]:
    """Return the decompressed content of a file, and the damage that was found."""
    with Source.open(str(path)) as source:
        content = source.read(1 << 30)
        return content, source.damage


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("before_border", [0, 1, 2, 5, 9, 11, 13, 200])
def test_header_of_a_member_may_lie_on_a_border_of_reading(
    tmp_path: Path, header: str, before_border: int
) -> None:
    first = b"A" * (_PIECE_BYTES - before_border)
    overhead = len(member(first)) - len(first)
    first = first[: len(first) - overhead]
    second = b"C" * 1000
    path = tmp_path / "a.gz"
    path.write_bytes(member(first) + member(second, header))
    assert len(member(first)) <= _PIECE_BYTES
    assert read_all(path) == (first + second, None)


@pytest.mark.parametrize("size", [1, 3, 100, _PIECE_BYTES])
def test_bytes_of_something_else_behind_the_data_are_named(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"ACGT" * 50) + b"x" * size)
    content, damage = read_all(path)
    assert content == b"ACGT" * 50
    assert damage is not None
    assert "follows the gzip data, which is complete; these bytes are of something else" in str(
        damage
    )


@pytest.mark.parametrize("zeros", [1, 511, 2 * _PIECE_BYTES])
def test_zeros_behind_the_data_are_no_damage(tmp_path: Path, zeros: int) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"ACGT") + bytes(zeros) + gzip.compress(b"TTTT") + bytes(zeros))
    assert read_all(path) == (b"ACGTTTTT", None)


def test_zstd_with_a_long_window_says_how_to_decompress_it(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "a.zst"
    path.write_bytes(packer.compress(b"ACGT" * 1000) + packer.flush())
    content, damage = read_all(path)
    assert content == b""
    assert damage is not None
    assert "zstd -d --long=31" in str(damage)


@pytest.mark.parametrize("between", [b"", bytes(8)], ids=["joined", "zeros between"])
@pytest.mark.parametrize("packing", ["gzip", "bzip2", "xz", "zstd"])
def test_any_border_of_reading_may_cut_the_first_bytes_of_a_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str, between: bytes
) -> None:
    """pbzip2 and pzstd write a member for each MB or less, so large files meet every border."""
    contents = [b"ACGT" * 30, b"TTTT", b"GG"]
    members = [pack_with(packing, content) for content in contents]
    path = tmp_path / "many"
    path.write_bytes(between.join(members))
    for bytes_before in range(1, 8):
        border = len(members[0]) + len(between) + bytes_before
        monkeypatch.setattr("virnuc_core.reads.sources._PIECE_BYTES", border)
        assert read_all(path) == (b"".join(contents), None)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_member_that_is_cut_within_its_first_bytes_is_damage(tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.bz2"
    path.write_bytes(bz2.compress(b"ACGT") + bz2.compress(b"TTTT")[:size])
    content, damage = read_all(path)
    assert (content, damage is None) == (b"ACGT", False)
