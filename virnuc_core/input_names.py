"""Tells by its name what an input of reads is: a path, standard input, an address or accessions."""

import os
import re
from typing import Final
from urllib.parse import unquote

from virnuc_core.errors import InputError

STDIN: Final = "-"  # the name of standard input
NCBI_PREFIX: Final = "ncbi:"  # before the accession numbers of sequences at NCBI


def is_address(name: str) -> bool:
    """Return True for an http(s) address."""
    return name[:8].lower().startswith(("http://", "https://"))


def is_remote(name: str) -> bool:
    """Return True for an http(s) address or `ncbi:` accessions, which must be downloaded first."""
    return is_address(name) or name.startswith(NCBI_PREFIX)


# An address that virnuc does not read, also with one slash as shells and editors leave it.
_OTHER_ADDRESS: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,3}(?=[^/])")
_REMOTE_COPY: Final = re.compile(r"[\w.-]+@[\w.-]+:.")  # user@host:path, as `scp` takes it
_FETCH_COMMANDS: Final = {
    "s3": "aws s3 cp {address} .",
    "gs": "gcloud storage cp {address} .",
    "ftp": "curl -O {address}",
    "ftps": "curl -O {address}",
    "sftp": "curl -O {address}",
    "scp": "curl -O {address}",
    "az": "azcopy copy {address} .",
    "rsync": "rsync {address} .",
    "dx": "dx download {address}",
    "hdfs": "hdfs dfs -get {address} .",
    "irods": "iget {address} .",
}


def expand_input(name: str) -> str:
    """Return an input as it is read: `~` becomes the home folder, and `file:///x` the path `/x`.

    Args:
        name: An input as a user named it.

    Raises:
        InputError: It is an address that virnuc does not read, such as `s3://…`. The message has
            the command that fetches the file.
    """
    if name == STDIN or is_remote(name) or os.path.lexists(name):
        return name
    if name.startswith("~"):
        # Unlike `Path.expanduser`, this leaves the name of an unknown user as it is.
        return os.path.expanduser(name)  # noqa: PTH111
    if name[:8].lower() == "file:///":
        return unquote(name[7:])
    if match := _OTHER_ADDRESS.match(name):
        scheme = match[1].lower()
        rest = name[match.end() :]
        host, slash, path = rest.partition("/")
        host = host.rpartition("@")[2]  # without a user name and password, for the message
        address = f"{scheme}://{host}{slash}{path}"
        if scheme in ("http", "https"):
            raise InputError(f"{address}: has one slash", hint=f"write {address}")
        command = _FETCH_COMMANDS.get(scheme, "").format(address=address)
        hint = f"fetch it first ({command}), and name the file"
        if not command:
            hint = "fetch it first, and name the file"
        raise InputError(f"{address}: {scheme}:// is not read directly", hint=hint)
    if _REMOTE_COPY.match(name):
        raise InputError(
            f"{name}: a file on another machine is not read directly",
            hint=f"fetch it first (scp {name} .), and name the file",
        )
    return name
