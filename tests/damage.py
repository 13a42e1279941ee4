"""Damage to files, as failing disks and careless hands do it, and edits that hide themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from virnuc_core.checked_files import OWN_DIGEST_FIELD, SEAL_BYTES
from virnuc_core.runfiles import digest
from virnuc_core.telemetry.log import TELEMETRY_SEAL


def flip_bit(path: Path, *, place: int = -20, bit: int = 3) -> None:
    """Flip one bit of a file: bit `bit` (0 to 7) of the byte at `place`, counted like an index."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let `change` alter the object in a JSON file, and remove the digest of the earlier content.

    A file without its own digest counts as one of an older version.
    """
    body = json.loads(path.read_text(encoding="utf-8"))
    body.pop(OWN_DIGEST_FIELD, None)
    change(body)
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def seal_again(path: Path) -> None:
    """Give an edited telemetry file the seal of its new content."""
    body = path.read_bytes()[SEAL_BYTES:]
    path.write_bytes(TELEMETRY_SEAL.seal_of(body) + body)


def list_again(run: Path) -> None:
    """Let the summary of a run list its result files with their present digests."""

    def put_digests(summary: dict[str, Any]) -> None:
        """Replace the digests of all files that are listed and still there."""
        for name in summary["files"]:
            content = digest(run / name)
            if content is not None:
                summary["files"][name] = content.model_dump()

    edit_json(run / "summary.json", put_digests)
