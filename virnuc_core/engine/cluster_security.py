"""Certificates for Dask clusters, and the private folders that hold them.

Anyone who can connect to a Dask scheduler can run code on all its nodes. Therefore each cluster
that we start gets a new certificate, made for one run. Only processes that can read the
certificate's key can connect.
"""

import ipaddress
import os
import shlex
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import dask
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from distributed import Security

from virnuc_core.errors import ConfigError
from virnuc_core.lease import is_alive, process_namespace, process_start_ticks

# The names of private folders begin with this.
PREFIX: Final = "virnuc-cluster-"
# The file of a private folder that says which process made the folder.
OWNER: Final = "owner"
# Dask's settings for certificates.
TLS: Final = "distributed.comm.tls"
# A certificate is valid from this long ago, because the clock of a node may be late.
CLOCK_DIFFERENCE: Final = timedelta(days=1)
# A certificate is valid for longer than jobs wait in a queue and a run computes.
VALID_FOR: Final = timedelta(days=365)
# Dask's names for the programs that connect to each other.
ROLES: Final = ("client", "scheduler", "worker")


@contextmanager
def private_folder(base: Path) -> Iterator[Path]:
    """Make a folder that only this user can open, and remove it at the end of the `with` block.

    A process that is killed leaves its folder behind. Such folders in `base` are removed first.

    Args:
        base: The folder in which the new one is made.

    Yields:
        The path of the new folder.
    """
    remove_stale_folders(base)
    with tempfile.TemporaryDirectory("", PREFIX, base, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # The file with the owner appears by a rename, so that no other process reads half of it.
        temp_path = folder / f"{OWNER}.part"
        temp_path.write_text(
            f"{process_namespace()}\n{os.getpid()}\n{process_start_ticks(os.getpid())}\n"
        )
        temp_path.rename(folder / OWNER)
        yield folder


def remove_stale_folders(base: Path) -> None:
    """Remove the private folders that ended processes of this user and this machine have left.

    The file `owner` in such a folder says which process made it.

    Args:
        base: The folder that holds the private folders.
    """
    for folder in base.glob(f"{PREFIX}*"):
        # A folder without a readable owner file was made a moment ago, or not by us. It stays.
        with suppress(OSError, ValueError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            namespace, pid, start_ticks = (folder / OWNER).read_text().splitlines()
            # The namespace names the machine. Processes of other machines cannot be checked.
            if namespace == process_namespace() and is_alive(int(pid), start_ticks) is False:
                shutil.rmtree(folder, ignore_errors=True)


def temporary_security(folder: Path) -> Security:
    """Make a certificate for one cluster, and write it and its key into a private folder.

    Dask can make certificates as well (`Security.temporary`). They have two drawbacks. Their key is
    only in memory, so that other programs could get it only on their command line, where all users
    can read it. And nodes whose clock is a second late refuse the certificate.

    Args:
        folder: A folder that only this user, and programs of this user on the nodes, can read.

    Returns:
        Dask's object for the settings of encrypted connections.
    """
    certificate = folder / "certificate.pem"
    key = folder / "key.pem"
    certificate_text, key_text = make_certificate()
    write_private(certificate, certificate_text)
    write_private(key, key_text)
    # The certificate is signed with its own key. So it is also the authority (CA) that each program
    # trusts, and all programs of the cluster use the same certificate.
    fields: dict[str, Any] = {"require_encryption": True, "tls_ca_file": str(certificate)}
    for role in ROLES:
        fields[f"tls_{role}_cert"] = str(certificate)
        fields[f"tls_{role}_key"] = str(key)
    return Security(**fields)


def make_certificate() -> tuple[str, str]:
    """Make a new key, and a certificate that is signed with the same key.

    Returns:
        The certificate and the key, each as PEM text.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "virnuc-cluster")])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_DIFFERENCE)
        .not_valid_after(now + VALID_FOR)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    certificate = builder.sign(key, hashes.SHA256())
    key_pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), key_pem.decode()


def write_private(path: Path, text: str) -> None:
    """Write a new file that only this user can read.

    Raises:
        FileExistsError: Something has this path already, also a symbolic link.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)


def configured_security() -> Security | None:
    """Return the certificates that the user has named in Dask's settings.

    Returns:
        Dask's object for encrypted connections. None if the settings do not name a certificate for
        each role (client, scheduler, worker).
    """
    settings = [f"{TLS}.ca-file", *(f"{TLS}.{role}.cert" for role in ROLES)]
    if not all(dask.config.get(name, None) for name in settings):
        return None
    security = Security(require_encryption=True)
    for role in ROLES:
        # If the settings name no key file, the key is in the same file as the certificate.
        if getattr(security, f"tls_{role}_key") is None:
            setattr(security, f"tls_{role}_key", getattr(security, f"tls_{role}_cert"))
    return security


def tls_options(security: Security, role: str) -> list[str]:
    """Return the command-line options that name the certificate files for a Dask program.

    Args:
        security: The certificates.
        role: The program: "scheduler" or "worker".
    """
    files = security.get_tls_config_for_role(role)
    return [
        "--tls-ca-file",
        files["ca_file"],
        "--tls-cert",
        files["cert"],
        "--tls-key",
        files["key"],
    ]


def folder_for_jobs(configured: str | None, shared: Path | None) -> Path:
    """Choose the folder for files that the jobs of a batch system must read.

    It is the configured folder, or else the shared folder, or else the home directory. A shared
    folder is passed over if it cannot be written to, or if a job script would need quotes for it.

    Args:
        configured: The setting `shared-temp-directory`, in which `$HOME` and `~` may stand. None if
            it is not set.
        shared: A folder that the nodes see, or None.

    Raises:
        ConfigError: The path has characters that would need quotes in a job script.
    """
    if configured:
        base = Path(os.path.expandvars(configured)).expanduser()
    elif shared is not None and os.access(shared, os.W_OK) and is_plain(shared):
        base = shared
    else:
        base = Path.home()
    if not is_plain(base):
        raise ConfigError(
            f"{base} cannot stand in a job script as it is. Name another folder that all nodes see "
            "with the key shared-temp-directory."
        )
    return base


def is_plain(path: Path) -> bool:
    """Return true if a path can stand in a shell script without quotes."""
    return shlex.quote(str(path)) == str(path)


def is_exposed(address: str) -> bool:
    """Return true if other machines can reach a scheduler, and the connection has no encryption.

    Args:
        address: Address of the scheduler, such as "tcp://10.0.0.1:8786".
    """
    if not address.startswith("tcp://"):
        return False  # Dask's other usual protocol, tls, is encrypted
    host = urlsplit(address).hostname or ""
    try:
        entries = socket.getaddrinfo(host, None)
    except OSError:
        # The name is unknown, so it may be anywhere.
        return True
    # Each entry is (family, type, protocol, name, address); an address begins with the IP address.
    ip_addresses = [ipaddress.ip_address(str(entry[4][0])) for entry in entries]
    return not all(ip_address.is_loopback for ip_address in ip_addresses)
