"""Who may connect to a Dask cluster: certificates, and the private folders that hold them.

Whoever can talk to a Dask scheduler can run code on all its nodes. A cluster that we start
therefore has a certificate of its own, made for one run. Only processes that can read its key can
connect.
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

PREFIX: Final = "virnuc-cluster-"
OWNER: Final = "owner"  # file of a private folder: the process that made it
TLS: Final = "distributed.comm.tls"
CLOCK_DIFFERENCE: Final = timedelta(days=1)  # by which a node's clock may be late
VALID_FOR: Final = timedelta(days=365)  # longer than a run and the time its jobs wait
ROLES: Final = ("client", "scheduler", "worker")


@contextmanager
def private_folder(base: Path) -> Iterator[Path]:
    """Make a folder that only this user can open, and remove it at the end of the `with` block.

    Folders that killed processes left in `base` are removed first.
    """
    remove_stale_folders(base)
    with tempfile.TemporaryDirectory("", PREFIX, base, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        temp_path = folder / f"{OWNER}.part"
        temp_path.write_text(
            f"{process_namespace()}\n{os.getpid()}\n{process_start_ticks(os.getpid())}\n"
        )
        temp_path.rename(folder / OWNER)
        yield folder


def remove_stale_folders(base: Path) -> None:
    """Remove this user's private folders in `base` whose process of this machine has ended."""
    for folder in base.glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError):  # no owner yet, or not made by us
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            namespace, pid, start_ticks = (folder / OWNER).read_text().splitlines()
            if namespace == process_namespace() and is_alive(int(pid), start_ticks) is False:
                shutil.rmtree(folder, ignore_errors=True)


def temporary_security(folder: Path) -> Security:
    """Make a certificate for one cluster, and write it and its key into a private folder.

    Dask can make one, too (`Security.temporary`), with two drawbacks. It keeps the key in memory,
    so that it can be handed to other programs in words only. And nodes whose clocks are a second
    late refuse it.
    """
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    certificate_text, key_text = make_certificate()
    write_private(certificate, certificate_text)
    write_private(key, key_text)
    fields: dict[str, Any] = {"require_encryption": True, "tls_ca_file": str(certificate)}
    for role in ROLES:
        fields[f"tls_{role}_cert"] = str(certificate)
        fields[f"tls_{role}_key"] = str(key)
    return Security(**fields)


def make_certificate() -> tuple[str, str]:
    """Make a new key and a certificate that it signed itself; return certificate and key as PEM."""
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
    """Write a new file that only this user can read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)


def configured_security() -> Security | None:
    """Return the certificates that Dask's settings name; None if they do not serve all roles."""
    settings = [f"{TLS}.ca-file", *(f"{TLS}.{role}.cert" for role in ROLES)]
    if not all(dask.config.get(name, None) for name in settings):
        return None
    security = Security(require_encryption=True)
    for role in ROLES:
        if getattr(security, f"tls_{role}_key") is None:  # it stands with the certificate
            setattr(security, f"tls_{role}_key", getattr(security, f"tls_{role}_cert"))
    return security


def tls_options(security: Security, role: str) -> list[str]:
    """Return the options of `dask scheduler` or `dask worker` that name its certificate files."""
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
    """Choose where a batch system's jobs can read the files of a cluster.

    Args:
        configured: The setting `shared-temp-directory`.
        shared: A folder that the nodes are known to see.

    Raises:
        ConfigError: The folder's path cannot stand in a job script.
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
    """Tell whether a shell takes a path as one word without quotes."""
    return shlex.quote(str(path)) == str(path)


def is_exposed(address: str) -> bool:
    """Tell whether the address of a scheduler has no TLS and is not of this machine alone."""
    if not address.startswith("tcp://"):
        return False
    host = urlsplit(address).hostname or ""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return True
    return not all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in found)
