"""What a run is called and tagged: sample, profile and devices at a glance in the run list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKED = (".gz", ".bz2", ".xz", ".zst", ".bgz")
READS = (".fastq", ".fq", ".fasta", ".fa", ".fna", ".ffn")
MAX_NAME = 60


def sample_of(reads: Sequence[str]) -> str:
    """A short name of the input: the first file without its endings, and how many more there are.

    >>> sample_of(["/data/lung_R1.fastq.gz"]), sample_of(["a.fa", "b.fa", "c.fa"]), sample_of(["-"])
    ('lung_R1', 'a+2', 'stdin')
    """
    if not reads:
        return "no-reads"
    name = "stdin" if reads[0] == "-" else Path(reads[0]).name
    for endings in (PACKED, READS):
        for ending in endings:
            if name.lower().endswith(ending) and len(name) > len(ending):
                name = name[: -len(ending)]
                break
    more = f"+{len(reads) - 1}" if len(reads) > 1 else ""
    return (name[:MAX_NAME] or "reads") + more


def run_name(*parts: object) -> str:
    """The parts that are known, joined: `lung_R1 · ci-smoke · cpu:2`."""
    return " · ".join(str(part) for part in parts if part)


def from_parameters(parameters: Mapping[str, Any], *keys: str) -> str:
    """A run name of the flow's own parameters; `reads` becomes the sample's name, a path its last part."""
    parts = []
    for key in keys:
        value = parameters.get(key)
        if key == "reads":
            parts.append(sample_of([str(read) for read in value or ()]))
        elif isinstance(value, Path) or (isinstance(value, str) and key in ("inbox", "profile")):
            parts.append(Path(value).name.removesuffix(".toml"))
        elif value is not None:
            parts.append(str(value))
    return run_name(*parts)
