"""Tells by its name what an input of reads is: a path, standard input, an address or accessions."""

from typing import Final

STDIN: Final = "-"  # the name of standard input
NCBI_PREFIX: Final = "ncbi:"  # before the accession numbers of sequences at NCBI


def is_address(name: str) -> bool:
    """Return True for an http(s) address."""
    return name[:8].lower().startswith(("http://", "https://"))


def is_remote(name: str) -> bool:
    """Return True for an http(s) address or `ncbi:` accessions, which must be downloaded first."""
    return is_address(name) or name.startswith(NCBI_PREFIX)
