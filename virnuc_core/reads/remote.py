"""Reads from elsewhere: http(s) downloads that go on where they broke off, and NCBI accessions."""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar, cast

from pydantic import ValidationError

from virnuc_core.config import Spec
from virnuc_core.errors import ConfigError, InputError
from virnuc_core.reads.sources import NCBI_PREFIX, is_remote
from virnuc_core.rundir import write_text_whole

NCBI_ADDRESS: Final = "https://eutils.ncbi.nlm.nih.gov/entrez/eutils/efetch.fcgi"
_TIMEOUT_S: Final = 60.0
_ATTEMPTS: Final = 4
_PAUSE_S: Final = 1.0  # after the first attempt
_ACCESSION: Final = re.compile(r"[A-Za-z]{1,6}_?\d{3,12}(\.\d+)?")
_log = logging.getLogger(__name__)
T = TypeVar("T")


class _Remembered(Spec):
    """What is known of a download, whole or in part, kept beside it."""

    url: str
    validator: str  # ETag or date by which the server recognises the same content; empty if it named none
    sha256: str | None  # of the whole file; unset while it is incomplete


def fetch_all(reads: Sequence[str], folder: Path, *, email: str | None = None) -> tuple[str, ...]:
    """The same inputs as local names: addresses and `ncbi:ACC,ACC` are fetched into `folder`, others stay.

    Errors: as of `fetch` and `fetch_accessions`.
    """
    local = []
    for name in reads:
        if name.startswith(NCBI_PREFIX):
            local.append(str(fetch_accessions(name.removeprefix(NCBI_PREFIX).split(","), folder, email=email)))
        else:
            local.append(str(fetch(name, folder)) if is_remote(name) else name)
    return tuple(local)


def fetch(url: str, folder: Path) -> Path:
    """Download `url` into `folder` and give the file; one that is there and still current is not downloaded again.

    A broken-off download goes on where it stopped if the server's file is still the same. Errors: `InputError` when
    the server refuses or cannot be reached after all attempts.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url}: only http and https addresses can be fetched")
    name = Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path)).name
    target = folder / (re.sub(r"[^\w.+-]", "_", name).lstrip(".") or "download")
    folder.mkdir(parents=True, exist_ok=True)
    _patiently(url, lambda: _download(url, target))
    return target


def _patiently(name: str, work: Callable[[], T]) -> T:
    """What `work` gives in one of some attempts, each pause twice as long. Errors: `InputError`, in words."""
    attempt = 1
    while True:
        try:
            return work()
        except (OSError, http.client.HTTPException) as error:  # URLError, time-outs, connections that break off
            if isinstance(error, urllib.error.HTTPError):
                error.close()
                if error.code < 500 and error.code not in (408, 416, 425, 429):
                    problem = f"the server says {error.code} {error.reason}"
                    raise InputError(problem, file=name, hint="check it") from error
            _log.warning("%s: attempt %d of %d: %s", name, attempt, _ATTEMPTS, error)
            if attempt >= _ATTEMPTS:
                hint = "is this machine offline? try again (what came so far is kept), or name a file fetched elsewhere"
                problem = f"cannot be fetched: {getattr(error, 'reason', None) or error}"
                raise InputError(problem, file=name, hint=hint) from error
        time.sleep(_PAUSE_S * 2 ** (attempt - 1))
        attempt += 1


def _download(url: str, target: Path) -> None:
    """One attempt. Whatever arrives is kept in `target`.part, and renamed once it is whole."""
    part, notes = target.with_name(f"{target.name}.part"), target.with_name(f".{target.name}.json")
    headers = {"User-Agent": "virnuc", "Accept-Encoding": "identity"}
    have = 0
    with suppress(OSError, ValidationError):  # else all of it is asked for
        known = _Remembered.model_validate_json(notes.read_bytes())
        if known.url == url and known.validator and known.sha256 is None:
            have = part.stat().st_size
            headers |= {"Range": f"bytes={have}-", "If-Range": known.validator} if have else {}
        elif known.url == url and known.validator and known.sha256 == _sha256(target):
            headers["If-None-Match" if '"' in known.validator else "If-Modified-Since"] = known.validator
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == 304:
            error.close()
            return
        if error.code == 416:  # what we have is not the beginning of what is there now
            part.unlink(missing_ok=True)
        raise
    with answer:
        told = answer.headers
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", told.get("Content-Range", ""))
        goes_on = answer.status == 206 and span is not None and int(span[1]) == have
        tag = told.get("ETag", "")  # a weak one (W/"…") does not stand for the very bytes: no part can go on by it
        validator = tag if tag.startswith('"') else told.get("Last-Modified", "")
        write_text_whole(notes, _Remembered(url=url, validator=validator, sha256=None).model_dump_json())
        with part.open("ab" if goes_on else "wb") as out:
            before = out.tell()
            shutil.copyfileobj(answer, out)
            out.flush()
            os.fsync(out.fileno())
            missing = int(told.get("Content-Length", out.tell() - before)) - (out.tell() - before)
            if missing:
                raise http.client.IncompleteRead(b"", missing)
    whole = _Remembered(url=url, validator=validator, sha256=_sha256(part))
    os.replace(part, target)
    write_text_whole(notes, whole.model_dump_json())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_accessions(accessions: Sequence[str], folder: Path, *, email: str | None) -> Path:
    """Sequences of NCBI nucleotide accessions as one FASTA file in `folder`; a file of the same accessions is kept.

    Errors: `ConfigError` without a mail address (NCBI asks for one) or for words that are no accessions; `InputError`
    when NCBI cannot be reached or does not give all of them.
    """
    wanted = [accession.strip() for accession in accessions if accession.strip()]
    wrong = [word for word in wanted if not _ACCESSION.fullmatch(word)]
    if wrong or not wanted:
        raise ConfigError(f"no NCBI accession: {', '.join(wrong) or 'nothing named'}; expected such as NC_045512.2")
    digest = hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:12]
    target = folder / f"ncbi_{digest}.fasta"
    if target.is_file():
        return target
    if not email:
        raise ConfigError("NCBI asks for a mail address with each request; give one, or download the FASTA yourself")
    query = {"db": "nuccore", "id": ",".join(wanted), "rettype": "fasta", "retmode": "text"}
    sent = urllib.parse.urlencode(query | {"tool": "virnuc", "email": email}).encode()

    def ask() -> str:
        with urllib.request.urlopen(NCBI_ADDRESS, sent, timeout=_TIMEOUT_S) as answer:
            return cast(bytes, answer.read()).decode()

    text = _patiently(f"{NCBI_PREFIX}{','.join(wanted)}", ask)
    given = {line[1:].split()[0] for line in text.splitlines() if line.startswith(">") and line[1:].strip()}
    missing = [word for word in wanted if word not in given and not any(g.partition(".")[0] == word for g in given)]
    if missing:
        raise InputError(f"NCBI has nothing for {', '.join(missing)}", hint="check the accessions")
    write_text_whole(target, text)
    return target
