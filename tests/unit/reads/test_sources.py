"""Opening inputs: every packing by content, cut-off and damaged files, folders, standard input."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from virnuc_core.config import ReadsSpec
from virnuc_core.errors import InputError
from virnuc_core.reads import sources
from virnuc_core.reads.mate_files import find_reads
from virnuc_core.reads.sources import Source, find_inputs

from .conftest import WriteReads

TEXT = b"".join(b">read%d\n%s\n" % (i, b"ACGT" * (i % 50)) for i in range(4_000))


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed file is many pieces, whatever its size."""
    monkeypatch.setattr(sources, "_PIECE_BYTES", 1 << 11)


def bgzip(data: bytes) -> bytes:
    """Blocks of at most 64 KiB with the extra field of bgzip, and its empty block at the end."""
    blocks = []
    for piece in [data[i : i + 60_000] for i in range(0, len(data), 60_000)] + [b""]:
        packer = zlib.compressobj(6, zlib.DEFLATED, -15)
        body = packer.compress(piece) + packer.flush()
        head = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x06\0BC\x02\0" + (len(body) + 25).to_bytes(
            2, "little"
        )
        blocks.append(
            head + body + zlib.crc32(piece).to_bytes(4, "little") + len(piece).to_bytes(4, "little")
        )
    return b"".join(blocks)


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "bgzip": bgzip,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zst,
}
PACKED = {name: pack for name, pack in PACKERS.items() if name != "plain"}


def everything(path: str, size: int = 1 << 16) -> bytes:
    with Source.open(path) as source:
        pieces = []
        while piece := source.read(size):
            pieces.append(piece)
        if source.damage is not None:
            raise source.damage
        return b"".join(pieces)


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS.keys())
@pytest.mark.parametrize("name", ["reads.fa", "reads.fastq.gz", "reads"])
def test_the_packing_is_detected_by_content(
    write: WriteReads, pack: Callable[[bytes], bytes], name: str
) -> None:
    assert everything(write(pack(TEXT), name)) == TEXT


@pytest.mark.parametrize("pack", PACKED.values(), ids=PACKED.keys())
def test_several_members_in_one_file(write: WriteReads, pack: Callable[[bytes], bytes]) -> None:
    cut = len(TEXT) // 3
    assert everything(write(pack(TEXT[:cut]) + pack(b"") + pack(TEXT[cut:]))) == TEXT


@pytest.mark.parametrize("pack", PACKED.values(), ids=PACKED.keys())
def test_zeros_after_the_last_member(write: WriteReads, pack: Callable[[bytes], bytes]) -> None:
    assert everything(write(pack(TEXT) + bytes(200_000))) == TEXT


@pytest.mark.parametrize("pack", PACKED.values(), ids=PACKED.keys())
def test_garbage_after_the_last_member_is_damage(
    write: WriteReads, pack: Callable[[bytes], bytes]
) -> None:
    with pytest.raises(InputError, match="data, which is complete"):
        everything(write(pack(TEXT) + b"rubbish" * 20))


@pytest.mark.parametrize(
    "pack", [gzip.compress, bz2.compress, lzma.compress, zst], ids=["gz", "bz2", "xz", "zst"]
)
@pytest.mark.parametrize("lost", [1, 9, 2000])
def test_a_cut_off_file_gives_its_content_and_reports_damage(
    write: WriteReads, pack: Callable[[bytes], bytes], lost: int
) -> None:
    path = write(pack(TEXT)[:-lost])
    with Source.open(path) as source:
        text = bytearray()
        while piece := source.read(1 << 16):
            text.extend(piece)
        assert TEXT.startswith(text)
        assert source.read(100) == b""
        assert source.damage is not None
        assert "cut off" in str(source.damage)
    assert str(source.damage.file) == path


@pytest.mark.parametrize(
    "pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gz", "bz2", "xz"]
)
@given(st.integers(0, 1 << 16), st.integers(1, 255))
def test_a_changed_byte_never_gives_other_text_silently(
    tmp_path_factory: pytest.TempPathFactory,
    pack: Callable[[bytes], bytes],
    place: int,
    change: int,
) -> None:
    text = TEXT[:8_000]
    compressed = bytearray(pack(text))
    compressed[place % len(compressed)] ^= change
    path = tmp_path_factory.getbasetemp() / "changed.bin"
    path.write_bytes(bytes(compressed))
    try:
        content = everything(str(path))
    except InputError:
        return
    assert content in (
        text,
        bytes(compressed),
    )  # a header field without meaning, or no longer a packed file by its first bytes


def test_standard_input_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.BytesIO(gzip.compress(TEXT))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
    assert everything("-") == TEXT
    assert not stream.closed


def test_a_slow_pipe_is_waited_for(tmp_path: Path) -> None:
    import threading

    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    compressed = gzip.compress(TEXT)

    def trickle() -> None:
        with fifo.open("wb", buffering=0) as file:
            for i in range(0, len(compressed), 1000):
                file.write(compressed[i : i + 1000])

    writer = threading.Thread(target=trickle)
    writer.start()
    try:
        assert everything(str(fifo)) == TEXT
    finally:
        writer.join(10)


# which files


def test_a_folder_gives_its_read_files_by_name(write: WriteReads, tmp_path: Path) -> None:
    write(gzip.compress(b"@b\nA\n+\nI\n"), "in/b.txt")
    write("\n>a\nA\n", "in/a.fa")
    write("read me", "in/README")
    write("", "in/empty.fa")
    write(">h\nA\n", "in/.hidden.fa")
    write(">d\nA\n", "in/deeper/d.fa")
    inputs = find_inputs((str(tmp_path / "in"),))
    assert [Path(name).name for name in inputs.files] == ["a.fa", "b.txt"]
    assert [Path(name).name for name in inputs.ignored] == ["README", "empty.fa"]


def test_a_broken_link_in_a_folder_is_not_ignored(write: WriteReads, tmp_path: Path) -> None:
    write(">a\nA\n", "in/a.fa")
    (tmp_path / "in" / "b.fa").symlink_to(tmp_path / "gone.fa")
    files = find_inputs((str(tmp_path / "in"),)).files
    assert [Path(name).name for name in files] == ["a.fa", "b.fa"]
    with pytest.raises(InputError, match=r"b\.fa: cannot be read: No such file"):
        everything(files[1])


def test_a_named_pipe_in_a_folder_is_named_as_ignored(write: WriteReads, tmp_path: Path) -> None:
    write(">a\nA\n", "in/a.fa")
    os.mkfifo(tmp_path / "in" / "b.fq")
    (tmp_path / "in" / "c.fq").symlink_to("/dev/zero")
    inputs = find_inputs((str(tmp_path / "in"),))
    assert [Path(name).name for name in inputs.files] == ["a.fa"]
    reasons = {Path(name).name: reason for name, reason in inputs.left_out.items()}
    assert set(reasons) == {"b.fq", "c.fq"}
    assert "a named pipe, socket or device, not read" in reasons["b.fq"]


def test_a_damaged_file_in_a_folder_is_not_ignored(write: WriteReads, tmp_path: Path) -> None:
    write(b"\x1f\x8b\x08\0broken", "in/broken.gz")
    assert len(find_inputs((str(tmp_path / "in"),)).files) == 1


def test_missing_repeated_and_empty_inputs_are_refused(write: WriteReads, tmp_path: Path) -> None:
    path = write(">a\nA\n", "in/a.fa")
    (tmp_path / "empty").mkdir()
    os.link(path, tmp_path / "hard.fa")
    for names, words in {
        (str(tmp_path / "absent.fa"),): "no such file or folder",
        (str(tmp_path / "empty"),): "holds no FASTA, FASTQ, BAM, CRAM or SAM file; name the files",
        (path, str(tmp_path / "in" / ".." / "in" / "a.fa")): "named twice",
        (path, str(tmp_path / "in")): "named twice",
        (path, str(tmp_path / "hard.fa")): "named twice",
        ("-", "-"): "named twice",
    }.items():
        with pytest.raises(InputError, match=words):
            find_inputs(names)


def test_a_folder_is_not_read_as_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        everything(str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="the super-user may read anything")
def test_a_file_without_permission(write: WriteReads) -> None:
    path = write(">a\nA\n")
    Path(path).chmod(0)
    with pytest.raises(InputError, match="Permission denied"):
        everything(path)


def test_a_closed_standard_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it where the shell said <&-
    with pytest.raises(InputError, match="standard input is closed"), Source.open("-"):
        """Not reached."""


def test_a_path_with_blanks_that_was_not_quoted_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "my first sample.fq"
    path.write_text("@r\nA\n+\nI\n")
    words = tuple(str(path).split())
    hint = f'put quotes around a path with blanks: "{path}"'
    with pytest.raises(InputError) as error_info:
        find_inputs(words)
    assert str(error_info.value) == f"{tmp_path}/my: no such file or folder; {hint}"
    assert error_info.value.exit_code == 2
    with pytest.raises(InputError, match=r"my: no such file or folder; check the path$"):
        find_inputs(words[:2])


def test_a_path_of_mates_with_blanks_is_recognised(tmp_path: Path) -> None:
    """The shell divides the path: the first word is a file of mates, and the other one is reads."""
    (tmp_path / "my R1.fq").write_text("@r\nA\n+\nI\n")
    spec = ReadsSpec(mates_1=(f"{tmp_path}/my",), mates_2=(f"{tmp_path}/my",), reads=("R1.fq",))
    with pytest.raises(InputError, match=r'blanks: ".*/my R1\.fq"$'):
        find_reads(spec)
