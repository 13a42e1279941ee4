"""Reads from elsewhere: http(s) downloads that go on where they broke off, and NCBI accessions.

What is named may come from a form in a browser, and what a server answers from anywhere. Private addresses are not
asked unless the environment allows it, nor is anything but http and https; sizes and speeds have limits. The query of
an address may be a signature that opens the file to whoever reads it: it stays in this process."""

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
from pathlib import Path
from typing import Any, BinaryIO, Final

import httpcore
import httpx
from pydantic import ValidationError

from virnuc_core.config import Spec
from virnuc_core.errors import ConfigError, InputError, printable
from virnuc_core.reads.sources import (
    NCBI_PREFIX,
    REDACTED_URL,
    full_urls,
    is_address,
    redact_url,
)
from virnuc_core.rundir import atomic_file, check_room, storage_errors, write_text_atomically
from virnuc_core.runfiles import sha256_of

NCBI_ADDRESS: Final = "https://eutils.ncbi.nlm.nih.gov/entrez/eutils/efetch.fcgi"
PRIVATE: Final = (
    "VIRNUC_PRIVATE_ADDRESSES"  # set to `allow`, addresses inside this network are fetched too
)
MAX_BYTES = 1 << 40
MIN_BYTES_PER_S = 1024  # over SLOW_S; a connection that gives less counts as broken off
SLOW_S = 60.0
_TIMEOUT_S: Final = 60.0
_ATTEMPTS: Final = 4
_PAUSE_S: Final = 1.0  # after the first attempt
_MAX_REDIRECTS: Final = 5
_ACCESSION: Final = re.compile(r"[A-Za-z]{1,6}_?\d{3,12}(\.\d+)?")
_log = logging.getLogger(__name__)


class _Remembered(Spec):
    """What is known of a download, whole or in part, kept beside it."""

    url: str  # without its query
    validator: (
        str  # ETag or date by which the server recognises the same content; empty if it named none
    )
    sha256: str | None  # of the whole file; unset while it is incomplete


def fetch_all(reads: Sequence[str], folder: Path, *, email: str | None = None) -> tuple[str, ...]:
    """The same inputs as local names: addresses and `ncbi:ACC,ACC` are fetched into `folder`, others stay."""
    local = []
    for name in reads:
        if name.startswith(NCBI_PREFIX):
            local.append(
                str(
                    fetch_accessions(name.removeprefix(NCBI_PREFIX).split(","), folder, email=email)
                )
            )
        else:
            local.append(str(fetch(name, folder)) if is_address(name) else name)
    return tuple(local)


def fetch(url: str, folder: Path) -> Path:
    """The file in `folder` to which `url`, whole or as `hidden` shows it, is downloaded; a current one is kept, and a
    broken-off one goes on if the server's is still the same. Two addresses are two files. Errors: `InputError` when the
    server refuses or cannot be reached, for a private address, beyond the limits, or if its query is not known."""
    if not is_address(url):
        raise ConfigError(f"{url}: only http and https addresses can be fetched")
    shown, whole = redact_url(url), full_urls.get(url, url)
    if REDACTED_URL.fullmatch(whole):
        raise InputError(
            "the query of this address was not kept", file=url, hint="give the whole address again"
        )
    if not re.fullmatch(r"[!-~]+", whole):
        raise ConfigError(
            f"{shown}: not a valid address; blanks and letters beyond ASCII are written as %20"
        )
    name = Path(
        urllib.parse.unquote(re.split(r"[?#]", whole)[0].partition("//")[2].partition("/")[2])
    ).name
    name = re.sub(r"[^\w.+-]", "_", name, flags=re.ASCII).lstrip(".")[-150:] or "download"
    target = folder / f"{hashlib.sha256(whole.encode()).hexdigest()[:12]}-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    _patiently(shown, lambda: _download(whole, target))
    return target


def _patiently(name: str, work: Callable[[], None]) -> None:
    """Do `work` in one of some attempts, each pause twice as long. Errors: `InputError`, in words."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            work()
            break
        except (OSError, httpx.HTTPError) as error:  # time-outs, connections that break off
            _log.warning(
                "%s: attempt %d of %d: %s", name, attempt, _ATTEMPTS, printable(str(error))
            )
            if attempt == _ATTEMPTS:
                hint = "is this machine offline? try again (what came so far is kept), or name a file fetched elsewhere"
                raise InputError(f"cannot be fetched: {error}", file=name, hint=hint) from error
        time.sleep(_PAUSE_S * 2 ** (attempt - 1))


def _download(url: str, target: Path) -> None:
    """One attempt. Whatever arrives is kept in `target`.part, and renamed once it is whole."""
    part, notes = target.with_name(f"{target.name}.part"), target.with_name(f".{target.name}.json")
    shown, headers, have = redact_url(url), {}, 0
    with suppress(OSError, ValidationError):  # else all of it is asked for
        known = _Remembered.model_validate_json(notes.read_bytes())
        if known.url == shown and known.validator and known.sha256 is None:
            have = part.stat().st_size
            headers = {"Range": f"bytes={have}-", "If-Range": known.validator} if have else {}
        elif known.url == shown and known.validator and known.sha256 == sha256_of(target):
            headers["If-None-Match" if '"' in known.validator else "If-Modified-Since"] = (
                known.validator
            )
    with _open(url, headers) as answer:
        if answer.status_code == httpx.codes.NOT_MODIFIED:
            return
        if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink(missing_ok=True)
            raise ConnectionError("what came before is not the beginning of what is there now")
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", ""))
        goes_on = (
            answer.status_code == httpx.codes.PARTIAL_CONTENT
            and span is not None
            and span[1] == str(have)
        )
        tag = answer.headers.get("ETag", "")
        # a weak one (W/"…") does not stand for the very bytes: no part goes on by it
        validator = tag if tag.startswith('"') else answer.headers.get("Last-Modified", "")
        write_text_atomically(
            notes, _Remembered(url=shown, validator=validator, sha256=None).model_dump_json()
        )
        with storage_errors(part), part.open("ab" if goes_on else "wb") as out:
            _copy(answer, out, shown)
    whole = _Remembered(url=shown, validator=validator, sha256=sha256_of(part))
    os.replace(part, target)
    write_text_atomically(notes, whole.model_dump_json())


def _copy(answer: httpx.Response, out: BinaryIO, name: str) -> None:
    """All of an answer, to the disk; `InputError` beyond the limits, an error of httpx where it breaks off, `OSError`
    where it is too slow."""
    room, told = MAX_BYTES - out.tell(), int(answer.headers.get("Content-Length", 0))
    began, came, problem = time.monotonic(), 0, f"at most {MAX_BYTES:,} are taken"
    if told > room:
        raise InputError(
            f"{told:,} bytes to come, {problem}", file=name, hint="fetch the file yourself"
        )
    check_room(Path(out.name).parent, told, "the reads to fetch")
    for piece in answer.iter_raw():
        room -= out.write(piece)
        came += len(piece)
        if room < 0:
            raise InputError(
                f"more bytes to come, {problem}", file=name, hint="fetch the file yourself"
            )
        if (spent := time.monotonic() - began) > SLOW_S:
            if came < spent * MIN_BYTES_PER_S:
                raise TimeoutError(f"too slow: {came:,} bytes in {spent:.0f} s")
            began, came = time.monotonic(), 0
    out.flush()
    os.fsync(out.fileno())


@contextmanager
def _open(
    url: str, headers: Mapping[str, str], sent: Mapping[str, str] | None = None
) -> Iterator[httpx.Response]:
    """The answer to a request, redirects followed. Errors: `OSError` and those of httpx, where another try may help;
    `InputError` for a refusal, and for where nobody should be sent."""
    shown, asked = (
        redact_url(url),
        {"User-Agent": "virnuc", "Accept-Encoding": "identity", **headers},
    )
    logging.getLogger("httpx").setLevel(
        logging.WARNING
    )  # else it tells whole addresses to whoever asks for its log
    with httpx.Client(timeout=_TIMEOUT_S) as client:
        # httpx has no way to name it; a proxy that the environment names may stand at a private address
        vars(vars(client._transport)["_pool"])["_network_backend"] = _Public()
        try:
            request = client.build_request("POST" if sent else "GET", url, headers=asked, data=sent)
            for _ in range(_MAX_REDIRECTS + 1):
                _refuse_private(request.url.host, request.url.port)
                answer, before = client.send(request, stream=True), request.url.scheme
                if sent or answer.next_request is None:
                    break
                answer.close()
                request = answer.next_request
                if request.url.scheme not in ("http", "https") or (before, request.url.scheme) == (
                    "https",
                    "http",
                ):
                    problem = f"redirects to {request.url.scheme}: from {before}:"
                    raise InputError(problem, file=shown, hint="fetch the file yourself")
            else:
                raise InputError("redirects too often", file=shown, hint="check the address")
        except (
            httpx.InvalidURL,
            ValueError,
        ) as error:  # a port that is no number, a host name with an empty part
            raise InputError(
                "is not, or redirects to, an address that can be read", file=shown
            ) from error
        with closing(answer):
            code, problem = (
                answer.status_code,
                f"the server says {answer.status_code} {answer.reason_phrase}",
            )
            if not answer.is_success and code not in (304, 416):
                if code >= 500 or code in (408, 425, 429):
                    raise ConnectionError(problem)
                raise InputError(problem, file=shown, hint="check it")
            yield answer


class _Public(httpcore.SyncBackend):
    """Connects to public addresses only, whatever a name meant when it was looked up before."""

    def connect_tcp(
        self, host: str, port: int, *more: Any, **options: Any
    ) -> httpcore.NetworkStream:
        opened = super().connect_tcp(host, port, *more, **options)
        try:
            _refuse_private(opened.get_extra_info("server_addr")[0], port)
        except InputError:
            opened.close()
            raise
        return opened


def _refuse_private(host: str, port: int | None) -> None:
    """`InputError` for a host with an address that only this network or this machine knows, unless that is allowed."""
    if os.environ.get(PRIVATE) == "allow":
        return
    with suppress(
        OSError
    ):  # a name that is not known here: the connection, or the proxy, will say so
        for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            address = ipaddress.ip_address(str(place[0]).partition("%")[0])
            if not (getattr(address, "ipv4_mapped", None) or address).is_global:
                hint = f"set {PRIVATE}=allow where reads may come from there"
                raise InputError(f"leads to the private address {address}", file=host, hint=hint)


def fetch_accessions(accessions: Sequence[str], folder: Path, *, email: str | None) -> Path:
    """Sequences of NCBI nucleotide accessions as one FASTA file in `folder`; a file of the same accessions is kept.
    Errors: `ConfigError` without a mail address or for words that are no accessions; `InputError` when NCBI cannot be
    reached or does not give all of them."""
    wanted = [accession.strip() for accession in accessions if accession.strip()]
    wrong = [word for word in wanted if not _ACCESSION.fullmatch(word)]
    if wrong or not wanted:
        raise ConfigError(
            f"no NCBI accession: {', '.join(wrong) or 'nothing named'}; expected such as NC_045512.2"
        )
    digest = hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:12]
    target = folder / f"ncbi_{digest}.fasta"
    if target.is_file():
        return target
    if not email:
        raise ConfigError(
            "NCBI asks for a mail address with each request; give one, or download the FASTA yourself"
        )
    query = {"db": "nuccore", "id": ",".join(wanted), "rettype": "fasta", "retmode": "text"}
    sent = query | {"tool": "virnuc", "email": email}
    name = f"{NCBI_PREFIX}{','.join(wanted)}"
    with atomic_file(target) as aside:

        def ask() -> None:
            with _open(NCBI_ADDRESS, {}, sent) as answer, aside.open("wb") as out:
                _copy(answer, out, name)

        _patiently(name, ask)
        with aside.open("rb") as file:
            given = {
                line[1:].split()[0].decode("latin-1")
                for line in file
                if line[:1] == b">" and line[1:].strip()
            }
        missing = [
            word
            for word in wanted
            if word not in given and not any(g.partition(".")[0] == word for g in given)
        ]
        if missing:
            raise InputError(
                f"NCBI has nothing for {', '.join(missing)}", hint="check the accessions"
            )
    return target
