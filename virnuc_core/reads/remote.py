"""Fetch reads from elsewhere: resumable http(s) downloads, and NCBI accessions.

Addresses may come from a form in a browser, and a server may answer anything. Only http and https
are used, private addresses are refused unless the environment allows them, and sizes and speeds
have limits. The query of an address may be a signature that opens the file to everybody who reads
it, so it never leaves this process.
"""

import hashlib
import ipaddress
import logging
import os
import re
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import httpcore
import httpx
from pydantic import ValidationError

from virnuc_core.confidential import EMAIL_VARIABLE
from virnuc_core.config import Spec
from virnuc_core.errors import ConfigError, InputError, printable
from virnuc_core.input_names import NCBI_PREFIX, is_address
from virnuc_core.lease import make_folder
from virnuc_core.proxies import warn_of_removed_proxies
from virnuc_core.reads.contact import contact_address, keep_contact_address
from virnuc_core.reads.sources import REDACTED_URL, full_urls, redact_url
from virnuc_core.rundir import atomic_file, check_room, storage_errors, write_text_atomically
from virnuc_core.runfiles import sha256_of
from virnuc_core.safe_files import open_to_write, read_file
from virnuc_core.system_errors import is_regular_file, read_with_retries

NCBI_ADDRESS: Final = "https://eutils.ncbi.nlm.nih.gov/entrez/eutils/efetch.fcgi"
# set to `allow`, addresses inside this network are fetched, too
PRIVATE: Final = "VIRNUC_PRIVATE_ADDRESSES"
MAX_BYTES = 1 << 40
MIN_BYTES_PER_S = 1024  # over SLOW_S; a connection that gives less counts as broken off
SLOW_S = 60.0
_TIMEOUT_S: Final = 60.0
_ATTEMPTS: Final = 4
_PAUSE_S: Final = 1.0  # after the first attempt
_MAX_REDIRECTS: Final = 5
_MAX_NAME: Final = 150
_RETRYABLE_STATUS: Final = (408, 425, 429)  # besides those from 500 on
_ACCESSION: Final = re.compile(r"[A-Za-z]{1,6}_?\d{3,12}(\.\d+)?")
_log = logging.getLogger(__name__)


class _DownloadNote(Spec):
    """A record of a download, whole or in part, that is kept beside it."""

    url: str  # without its query
    # ETag or date by which the server recognises the same content; empty if it named none
    validator: str
    sha256: str | None  # of the whole file; None while it is incomplete


def fetch_all(reads: Sequence[str], folder: Path, *, email: str | None = None) -> tuple[str, ...]:
    """Fetch all remote inputs.

    Args:
        reads: Files, addresses, and accessions as `ncbi:ACC,ACC`.
        folder: The folder for what is fetched.
        email: A mail address, which NCBI asks for; by default that of `contact_address`.

    Returns:
        The same inputs as local names, in the same order.

    Raises:
        ConfigError: An address or accession is not valid, or NCBI's mail address is missing.
        InputError: A file or a sequence cannot be fetched.
    """
    keep_contact_address(email)
    local_names: list[str] = []
    for name in reads:
        if name.startswith(NCBI_PREFIX):
            accessions = name.removeprefix(NCBI_PREFIX).split(",")
            local_names.append(str(fetch_accessions(accessions, folder, email=contact_address())))
        elif is_address(name):
            local_names.append(str(fetch(name, folder)))
        else:
            local_names.append(name)
    return tuple(local_names)


def fetch(url: str, folder: Path) -> Path:
    """Download a file.

    If the file was downloaded before and has not changed on the server, it is kept. An incomplete
    download is continued if the file on the server is still the same. Each address gets a file of
    its own.

    Args:
        url: The whole address, or its form without the query as `redact_url` returns it.
        folder: The folder for the file.

    Returns:
        The file in `folder`.

    Raises:
        ConfigError: This is not a valid http(s) address.
        InputError: The server refuses or cannot be reached, the address is private, a limit is
            exceeded, or the address was recorded without its query and is needed in full.
    """
    if not is_address(url):
        raise ConfigError(f"{url}: only http and https addresses can be fetched")
    redacted_url = redact_url(url)
    full_url = full_urls.get(url, url)
    if REDACTED_URL.fullmatch(full_url):
        raise InputError(
            "the query of this address was not kept", file=url, hint="give the whole address again"
        )
    if not re.fullmatch(r"[!-~]+", full_url):  # the letters of ASCII that are visible
        raise ConfigError(
            f"{redacted_url}: not a valid address; blanks and letters beyond ASCII are "
            "written as %20"
        )
    digest = hashlib.sha256(full_url.encode()).hexdigest()[:12]
    target = folder / f"{digest}-{_file_name_of(full_url)}"
    make_folder(folder)
    _retry(redacted_url, lambda: _download(full_url, target))
    return target


def _file_name_of(url: str) -> str:
    """Return the last part of an address's path as a safe file name."""
    address = re.split(r"[?#]", url)[0]
    host_and_path = address.partition("//")[2]
    path = host_and_path.partition("/")[2]
    name = Path(urllib.parse.unquote(path)).name
    safe_name = re.sub(r"[^\w.+-]", "_", name, flags=re.ASCII).lstrip(".")
    return safe_name[-_MAX_NAME:] or "download"  # its end has the endings, such as .fastq.gz


def _retry(name: str, work: Callable[[], None]) -> None:
    """Call `work`, and call it again after network errors, up to `_ATTEMPTS` times.

    Each pause between two attempts is twice as long as the one before.

    Raises:
        InputError: The last attempt failed, too.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            work()
            break
        except (OSError, httpx.HTTPError) as error:  # time-outs, connections that break off
            details = printable(str(error))
            _log.warning("%s: attempt %d of %d: %s", name, attempt, _ATTEMPTS, details)
            if attempt == _ATTEMPTS:
                raise InputError(
                    f"cannot be fetched: {error}",
                    file=name,
                    hint="is this machine offline? try again (what came so far is kept), "
                    "or name a file fetched elsewhere",
                ) from error
        time.sleep(_PAUSE_S * 2 ** (attempt - 1))


@dataclass
class _Download:
    """The files of a download, and the headers of its request."""

    url: str
    target: Path
    part: Path  # the bytes that were received so far
    note: Path  # a `_DownloadNote`
    # Headers that request only the rest of the file, or the file only if it has changed.
    headers: dict[str, str] = field(default_factory=dict)
    n_bytes_present: int = 0  # size of `part`, if the download can be continued

    @property
    def redacted_url(self) -> str:
        """Return the address as it may be recorded."""
        return redact_url(self.url)

    def write_note(self, validator: str, sha256: str | None) -> None:
        """Record which content of the server the files hold, in a file beside them.

        Args:
            validator: The ETag or date by which the server recognises the content.
            sha256: The digest of the whole file; None while it is incomplete.
        """
        note = _DownloadNote(url=self.redacted_url, validator=validator, sha256=sha256)
        write_text_atomically(self.note, note.model_dump_json())


def _download(url: str, target: Path) -> None:
    """Make one attempt to download a file.

    The data is written to `<target>.part`, which is renamed to `target` when it is complete. If
    the server answers that the file has not changed, nothing is written.

    Raises:
        OSError: The connection failed, or the server's file is another one than before.
        httpx.HTTPError: Another error of the connection.
    """
    download = _plan_download(url, target)
    with _request(url, download.headers) as response:
        if response.status_code == httpx.codes.NOT_MODIFIED:
            return
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            # The file has fewer bytes now than were received. The next attempt begins anew.
            download.part.unlink(missing_ok=True)
            raise ConnectionError("the file on the server has changed since the last attempt")
        # The note comes before the data, so that the next attempt knows which content the part has.
        validator = _validator_of(response)
        download.write_note(validator, sha256=None)
        is_continued = _continues(response, download.n_bytes_present)
        with (
            storage_errors(download.part),
            open_to_write(download.part, append=is_continued) as file,
        ):
            _save_body(response, file, download.part.parent, download.redacted_url)
    sha256 = sha256_of(download.part)
    os.replace(download.part, target)
    download.write_note(validator, sha256)


def _plan_download(url: str, target: Path) -> _Download:
    """Look at the files of an earlier download, and choose the headers of the request.

    An incomplete download is continued with a range request. For a complete one, the server is
    asked to send the file only if it has changed. Without a valid note the whole file is requested.
    """
    download = _Download(
        url=url,
        target=target,
        part=target.with_name(f"{target.name}.part"),
        note=target.with_name(f".{target.name}.json"),
    )
    # Only files that are absent, and a note that is damaged, lead to a new download. A file that
    # cannot be read now raises an `UnreadableError`.
    with suppress(FileNotFoundError, NotADirectoryError, ValidationError):
        text = read_with_retries(download.note, lambda: read_file(download.note))
        note = _DownloadNote.model_validate_json(text)
        if note.url != download.redacted_url or not note.validator:
            return download
        if note.sha256 is None:
            part_status = read_with_retries(download.part, download.part.stat)
            download.n_bytes_present = part_status.st_size
            if download.n_bytes_present > 0:
                download.headers["Range"] = f"bytes={download.n_bytes_present}-"
                download.headers["If-Range"] = note.validator
        elif note.sha256 == read_with_retries(target, lambda: sha256_of(target)):
            # The file is complete and as it was downloaded. An ETag is quoted, a date is not.
            is_etag = '"' in note.validator
            header = "If-None-Match" if is_etag else "If-Modified-Since"
            download.headers[header] = note.validator
    return download


def _validator_of(response: httpx.Response) -> str:
    """Return the ETag or the date by which the server identifies this version of the file.

    Returns:
        The value, or an empty string if the server sent neither.
    """
    etag: str = response.headers.get("ETag", "")
    if etag.startswith('"'):
        return etag
    # A weak ETag (W/"…") may be equal for different bytes, so it cannot be used to continue a
    # download. The date is used instead.
    last_modified: str = response.headers.get("Last-Modified", "")
    return last_modified


def _continues(response: httpx.Response, n_bytes_present: int) -> bool:
    """Return whether the response begins directly after the bytes that are already present."""
    content_range = response.headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", content_range)
    is_partial = response.status_code == httpx.codes.PARTIAL_CONTENT
    return is_partial and match is not None and match[1] == str(n_bytes_present)


def _save_body(response: httpx.Response, file: BinaryIO, folder: Path, name: str) -> None:
    """Write the whole body of a response to a file, and flush it to the disk.

    Args:
        response: A response whose body was not read yet.
        file: The file, to whose end the body is written.
        folder: The folder of the file, whose disk needs room. The name of an open file does not
            tell it: a temporary file has the name of its descriptor.
        name: Name of the file for messages.

    Raises:
        InputError: The file becomes larger than `MAX_BYTES`.
        httpx.HTTPError: The connection broke off.
        OSError: The connection is too slow, or the disk is full.
    """
    n_bytes_allowed = MAX_BYTES - file.tell()
    n_bytes_announced = int(response.headers.get("Content-Length", 0))
    if n_bytes_announced > n_bytes_allowed:
        raise _too_large_error(f"{n_bytes_announced:,} bytes", name)
    check_room(folder, n_bytes_announced, "the reads to fetch")
    interval_start_s = time.monotonic()
    n_bytes_in_interval = 0
    for piece in response.iter_raw():
        n_bytes_allowed -= file.write(piece)
        n_bytes_in_interval += len(piece)
        if n_bytes_allowed < 0:
            raise _too_large_error(f"more than {MAX_BYTES:,} bytes", name)
        # The speed is checked once in each interval of `SLOW_S` seconds.
        elapsed_s = time.monotonic() - interval_start_s
        if elapsed_s > SLOW_S:
            if n_bytes_in_interval < elapsed_s * MIN_BYTES_PER_S:
                raise TimeoutError(f"too slow: {n_bytes_in_interval:,} bytes in {elapsed_s:.0f} s")
            interval_start_s = time.monotonic()
            n_bytes_in_interval = 0
    file.flush()
    os.fsync(file.fileno())


def _too_large_error(amount: str, name: str) -> InputError:
    """Return the error for a file that is larger than `MAX_BYTES`."""
    return InputError(
        f"the file has {amount}, but at most {MAX_BYTES:,} bytes can be fetched",
        file=name,
        hint="fetch the file yourself",
    )


def _client() -> httpx.Client:
    """Return a client for connections to other machines, through the user's proxy if there is one.

    Raises:
        ConfigError: The environment names a proxy that cannot be used.
    """
    warn_of_removed_proxies()
    try:
        return httpx.Client(timeout=_TIMEOUT_S)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise ConfigError(
            "the proxies of the environment (all_proxy, http_proxy, https_proxy, no_proxy) cannot "
            f"be used: {error}; correct or unset them"
        ) from error


@contextmanager
def _request(
    url: str, headers: Mapping[str, str], form: Mapping[str, str] | None = None
) -> Iterator[httpx.Response]:
    """Send a request and follow redirects.

    Args:
        url: The whole address.
        headers: Headers in addition to those that every request has.
        form: Fields to send by POST. If None, GET is used.

    Yields:
        The response, whose body was not read yet. Its status is a success, 304 (not modified) or
        416 (the requested range is not available).

    Raises:
        OSError, httpx.HTTPError: A network error; another attempt may succeed.
        InputError: The server refuses, or the address leads to a private address.
    """
    redacted_url = redact_url(url)
    # "identity": the server must not compress the file for the transfer.
    all_headers = {"User-Agent": "virnuc", "Accept-Encoding": "identity", **headers}
    # By default httpx logs complete addresses, with their secret queries.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with _client() as client:
        # httpx has no public option to check the address of a connection, so its internal network
        # backend is replaced. Connections to a proxy use another pool and are not checked.
        vars(vars(client._transport)["_pool"])["_network_backend"] = _PublicBackend()
        try:
            method = "POST" if form else "GET"
            request = client.build_request(method, url, headers=all_headers, data=form)
            response = _follow_redirects(client, request, redacted_url)
        except (httpx.InvalidURL, ValueError) as error:  # such as a port that is not a number
            raise InputError(
                "is not, or redirects to, an address that can be read", file=redacted_url
            ) from error
        with closing(response):
            _check_status(response, redacted_url)
            yield response


def _follow_redirects(
    client: httpx.Client, request: httpx.Request, redacted_url: str
) -> httpx.Response:
    """Send a request, and follow redirects if it is not a POST.

    Raises:
        InputError: A redirect leads to a private address, from https to http, or to another
            scheme, or there are more than `_MAX_REDIRECTS` redirects.
    """
    for _ in range(_MAX_REDIRECTS + 1):
        _refuse_private(request.url.host, request.url.port)
        scheme = request.url.scheme
        response = client.send(request, stream=True)
        if request.method == "POST" or response.next_request is None:
            return response
        response.close()
        request = response.next_request
        next_scheme = request.url.scheme
        is_web = next_scheme in ("http", "https")
        loses_encryption = scheme == "https" and next_scheme == "http"
        if not is_web or loses_encryption:
            raise InputError(
                f"redirects to {next_scheme}: from {scheme}:",
                file=redacted_url,
                hint="fetch the file yourself",
            )
    raise InputError("redirects too often", file=redacted_url, hint="check the address")


def _check_status(response: httpx.Response, redacted_url: str) -> None:
    """Raise an error if the status of a response is neither a success, 304 nor 416.

    Raises:
        ConnectionError: The server has a problem; another attempt may succeed.
        InputError: The server refuses the request.
    """
    code = response.status_code
    accepted_codes = (httpx.codes.NOT_MODIFIED, httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE)
    if response.is_success or code in accepted_codes:
        return
    problem = f"the server says {code} {response.reason_phrase}"
    if code >= 500 or code in _RETRYABLE_STATUS:
        raise ConnectionError(problem)
    raise InputError(problem, file=redacted_url, hint="check it")


class _PublicBackend(httpcore.SyncBackend):
    """Connects to public addresses only.

    The address is checked after connecting, because a name server may answer with another address
    than in an earlier check.
    """

    def connect_tcp(
        self, host: str, port: int, *more: Any, **options: Any
    ) -> httpcore.NetworkStream:
        """Connect, and refuse a private address.

        Args:
            host: The host.
            port: The port.
            *more: Further arguments of `httpcore.SyncBackend.connect_tcp`.
            **options: The same, by name.

        Returns:
            The connection.

        Raises:
            InputError: The address is private. The connection is closed.
        """
        stream = super().connect_tcp(host, port, *more, **options)
        try:
            _refuse_private(stream.get_extra_info("server_addr")[0], port)
        except InputError:
            stream.close()
            raise
        return stream


def _refuse_private(host: str, port: int | None) -> None:
    """Raise an `InputError` if a host has a private address, such as one of this machine.

    `VIRNUC_PRIVATE_ADDRESSES=allow` in the environment allows all addresses.
    """
    if os.environ.get(PRIVATE) == "allow":
        return
    # An unknown name is not reported here: connecting to it fails, or a proxy may know it.
    with suppress(OSError):
        for *_, socket_address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            text = str(socket_address[0]).partition("%")[0]  # without the network interface
            address = ipaddress.ip_address(text)
            # An IPv6 address may stand for an IPv4 address, which then decides.
            deciding_address = getattr(address, "ipv4_mapped", None) or address
            if not deciding_address.is_global:
                raise InputError(
                    f"leads to the private address {address}",
                    file=host,
                    hint=f"set {PRIVATE}=allow where reads may come from there",
                )


def fetch_accessions(accessions: Sequence[str], folder: Path, *, email: str | None) -> Path:
    """Fetch sequences of NCBI's nucleotide database.

    Args:
        accessions: Accession numbers such as `NC_045512.2`, with or without a version.
        folder: The folder for the file. A file of the same accessions is kept.
        email: A mail address, which NCBI asks for.

    Returns:
        One FASTA file with all of them.

    Raises:
        ConfigError: There is no mail address, or a word is not an accession number.
        InputError: NCBI cannot be reached, or does not have all of them.
    """
    wanted_accessions = [accession.strip() for accession in accessions if accession.strip()]
    invalid = [word for word in wanted_accessions if not _ACCESSION.fullmatch(word)]
    if invalid or not wanted_accessions:
        words = ", ".join(invalid) or "none is named"
        raise ConfigError(f"not an NCBI accession: {words}; an accession looks like NC_045512.2")
    digest = hashlib.sha256("\n".join(wanted_accessions).encode()).hexdigest()[:12]
    target = folder / f"ncbi_{digest}.fasta"
    if is_regular_file(target):
        return target
    if not email:
        raise ConfigError(
            "NCBI asks for a mail address with each request; give one with --email or the variable "
            f"{EMAIL_VARIABLE} (of the worker, for a deployment), or download the FASTA yourself"
        )
    form = {
        "db": "nuccore",
        "id": ",".join(wanted_accessions),
        "rettype": "fasta",
        "retmode": "text",
        "tool": "virnuc",
        "email": email,
    }
    name = f"{NCBI_PREFIX}{','.join(wanted_accessions)}"
    with atomic_file(target) as temp_path:

        def download() -> None:
            """Write the answer of NCBI to the temporary file. This is one attempt."""
            with _request(NCBI_ADDRESS, {}, form) as response, temp_path.open("wb") as file:
                _save_body(response, file, folder, name)

        _retry(name, download)
        missing = _find_missing(wanted_accessions, temp_path)
        if missing:
            raise InputError(
                f"NCBI has nothing for {', '.join(missing)}", hint="check the accessions"
            )
    return target


def _find_missing(accessions: Sequence[str], fasta: Path) -> list[str]:
    """Return the accessions that no header of a FASTA file names, with or without a version."""
    received_ids = set[str]()
    with fasta.open("rb") as file:
        for line in file:
            if line.startswith(b">") and line[1:].strip():
                read_id = line[1:].split()[0].decode("latin-1")
                without_version = read_id.partition(".")[0]
                received_ids.update((read_id, without_version))
    return [accession for accession in accessions if accession not in received_ids]
