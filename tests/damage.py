"""Damage to files, as failing disks and careless hands do it."""

from __future__ import annotations

from pathlib import Path


def flip_bit(path: Path, *, place: int = -20, bit: int = 3) -> None:
    """Flip one bit of a file: bit `bit` (0 to 7) of the byte at `place`, counted like an index."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)
