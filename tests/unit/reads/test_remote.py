"""Downloads from a server of our own on the loopback, and accessions from a fake NCBI."""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import httpx
import pytest

from virnuc_core.errors import ConfigError, InputError, StorageError, UnsafeFileError
from virnuc_core.input_names import is_remote
from virnuc_core.reads import remote
from virnuc_core.reads.remote import PRIVATE, fetch, fetch_accessions, fetch_all
from virnuc_core.reads.sources import redact_url

CONTENT = b"".join(b">r%d\nACGT\n" % i for i in range(50_000))


@dataclass
class Behaviour:
    """What the server does, and what it saw."""

    content: bytes = CONTENT
    etag: str | None = '"one"'
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)  # bytes after which the next answers break off
    codes: list[int] = field(default_factory=list)  # errors given before anything else
    requests: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    redirects: dict[str, str] = field(default_factory=dict)  # where requests for a path are sent
    length: int | None = None  # what is told instead of the true one


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Behaviour]]:
    monkeypatch.setenv(PRIVATE, "allow")  # the loopback is no public address
    behaviour = Behaviour()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            behaviour.requests.append(dict(self.headers))
            behaviour.paths.append(self.path)
            if target := behaviour.redirects.get(self.path):
                self.send_response(302)
                self.send_header("Location", target)
                self.end_headers()
                return
            if behaviour.codes:
                self.send_error(behaviour.codes.pop(0))
                return
            if behaviour.etag is not None and self.headers.get("If-None-Match") == behaviour.etag:
                self.send_response(304)
                self.end_headers()
                return
            start, content = 0, behaviour.content
            requested_range = self.headers.get("Range")
            if (
                requested_range
                and behaviour.ranges
                and self.headers.get("If-Range") == behaviour.etag
            ):
                start = int(requested_range.removeprefix("bytes=").removesuffix("-"))
                if start >= len(content):
                    self.send_error(416)
                    return
                self.send_response(206)
                self.send_header(
                    "Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}"
                )
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(behaviour.length or len(content) - start))
            if behaviour.etag is not None:
                self.send_header("ETag", behaviour.etag)
            self.end_headers()
            body = content[start:]
            self.wfile.write(body[: behaviour.cuts.pop(0)] if behaviour.cuts else body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}/some/reads%20one.fa?x=1", behaviour
        listening.shutdown()
        thread.join()


Server = tuple[str, Behaviour]


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PAUSE_S", 0)


def broken_off(url: str, folder: Path) -> None:
    """A download that has one attempt, which breaks off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "_ATTEMPTS", 1)
        with pytest.raises(InputError, match="try again"):
            fetch(url, folder)


def test_a_whole_download(server: Server, tmp_path: Path) -> None:
    url, _ = server
    path = fetch(url, tmp_path)
    assert path.name.endswith("-reads_one.fa")
    assert path.read_bytes() == CONTENT
    assert not list(tmp_path.glob("*.part"))


def test_a_broken_download_is_continued(server: Server, tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.cuts = [100_000, 50_000]
    assert fetch(url, tmp_path).read_bytes() == CONTENT
    assert [request.get("Range") for request in behaviour.requests] == [
        None,
        "bytes=100000-",
        "bytes=150000-",
    ]


def test_a_broken_download_is_continued_by_a_later_call(server: Server, tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.cuts = [100_000]
    broken_off(url, tmp_path)
    assert not list(tmp_path.glob("*.fa"))
    assert fetch(url, tmp_path).read_bytes() == CONTENT
    assert behaviour.requests[-1]["Range"] == "bytes=100000-"


def test_a_download_starts_over_if_the_content_changed(server: Server, tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.cuts = [100_000]
    broken_off(url, tmp_path)
    behaviour.content, behaviour.etag = CONTENT[::-1], '"two"'
    assert fetch(url, tmp_path).read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_a_download_starts_over_without_a_strong_tag(
    server: Server, tmp_path: Path, etag: str | None
) -> None:
    url, behaviour = server
    behaviour.cuts, behaviour.etag = [100_000], etag
    assert fetch(url, tmp_path).read_bytes() == CONTENT
    assert [request.get("Range") for request in behaviour.requests] == [None, None]


def test_a_server_without_ranges(server: Server, tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.cuts, behaviour.ranges = [100_000], False
    assert fetch(url, tmp_path).read_bytes() == CONTENT


def test_a_part_longer_than_the_file_is_dropped(server: Server, tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.cuts = [100_000]
    broken_off(url, tmp_path)
    next(tmp_path.glob("*-reads_one.fa.part")).write_bytes(bytes(10_000_000))
    assert fetch(url, tmp_path).read_bytes() == CONTENT
    assert [request.get("Range") for request in behaviour.requests] == [
        None,
        "bytes=10000000-",
        None,
    ]


def test_a_current_file_is_not_downloaded_again(server: Server, tmp_path: Path) -> None:
    url, behaviour = server
    path = fetch(url, tmp_path)
    changed_ns = path.stat().st_mtime_ns
    fetch(url, tmp_path)
    assert behaviour.requests[-1]["If-None-Match"] == '"one"'
    assert path.stat().st_mtime_ns == changed_ns
    behaviour.content, behaviour.etag = b">new\nA\n", '"new"'
    assert fetch(url, tmp_path).read_bytes() == b">new\nA\n"


def test_a_file_changed_on_disk_is_fetched_again(server: Server, tmp_path: Path) -> None:
    url, _ = server
    fetch(url, tmp_path).write_bytes(b"spoilt")
    assert fetch(url, tmp_path).read_bytes() == CONTENT


def test_server_errors_are_retried_but_refusals_are_not(server: Server, tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.codes = [503, 500]
    assert fetch(url, tmp_path).read_bytes() == CONTENT
    assert len(behaviour.requests) == 3
    behaviour.codes = [404]
    with pytest.raises(InputError, match="404"):
        fetch(url.replace("one", "two"), tmp_path)
    assert len(behaviour.requests) == 4


def test_a_server_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRIVATE, "allow")
    with pytest.raises(InputError, match="offline") as error_info:
        fetch("http://127.0.0.1:9/reads.fa", tmp_path)
    assert "\n" not in str(error_info.value)


@pytest.mark.parametrize("url", ["ftp://x/y.fa", "file:///etc/passwd", "reads.fa"])
def test_only_http_and_https_are_fetched(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="only http"):
        fetch(url, tmp_path)


def test_file_names_cannot_leave_the_folder(server: Server, tmp_path: Path) -> None:
    url, _ = server
    base = url[: url.index("/some")]
    for tail in ("/..%2F..%2Fetc%2Fpasswd", "/.hidden", "/", "/%2e%2e"):
        path = fetch(base + tail, tmp_path / "in")
        assert path.parent == tmp_path / "in"
        assert not path.name.startswith(".")


def test_fetch_all_leaves_files_alone(server: Server, tmp_path: Path) -> None:
    url, _ = server
    assert fetch_all(("a.fa", "-", url), tmp_path) == ("a.fa", "-", str(fetch(url, tmp_path)))
    assert [is_remote(name) for name in ("a.fa", "-", url, "ncbi:NC_045512.2")] == [
        False,
        False,
        True,
        True,
    ]


def test_two_addresses_with_one_file_name_are_two_files(server: Server, tmp_path: Path) -> None:
    url, behaviour = server
    first_path = fetch(url.replace("some", "lung"), tmp_path)
    behaviour.content, behaviour.etag = b">other\nA\n", '"other"'
    second, third = fetch(url.replace("some", "liver"), tmp_path), fetch(url + "&file=2", tmp_path)
    assert len({first_path, second, third}) == 3
    assert first_path.read_bytes() == CONTENT


def test_redirects_stay_with_http_and_with_public_addresses(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, behaviour = server
    base = url[: url.index("/some")]
    behaviour.redirects = {
        "/a": "/some/b",
        "/f": "file:///etc/passwd",
        "/x": "ftp://127.0.0.1/x",
        "/loop": "/loop",
    }
    assert fetch(f"{base}/a", tmp_path).read_bytes() == CONTENT
    for path, words in {
        "/f": "redirects to file:",
        "/x": "redirects to ftp:",
        "/loop": "redirects too often",
    }.items():
        n_requests = len(behaviour.paths)
        with pytest.raises(InputError, match=words):
            fetch(base + path, tmp_path)
        assert len(behaviour.paths) - n_requests <= 6  # refused, not tried again
    monkeypatch.delenv(PRIVATE)
    for address in (
        url,
        "http://localhost:1/x",
        "http://[::1]:1/x",
        "http://169.254.169.254/latest",
        "http://0/x",
    ):
        n_requests = len(behaviour.paths)
        with pytest.raises(InputError, match=f"private address.*{PRIVATE}"):
            fetch(address, tmp_path)
        assert len(behaviour.paths) == n_requests


def test_a_host_that_becomes_private_is_refused_at_connection(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, behaviour = server
    monkeypatch.delenv(PRIVATE)
    original_check = remote._refuse_private  # of names; of addresses it is asked again
    monkeypatch.setattr(
        remote,
        "_refuse_private",
        lambda host, port: original_check(host, port) if host == "127.0.0.1" else None,
    )
    with pytest.raises(InputError, match="private address"):
        fetch(url, tmp_path)
    assert behaviour.paths == []


def test_a_download_has_limits(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, behaviour = server
    behaviour.length = 1 << 60
    with pytest.raises(InputError, match="1,152,921,504,606,846,976 bytes"):
        fetch(url, tmp_path)
    behaviour.length = None
    monkeypatch.setattr(remote, "MAX_BYTES", 100_000)
    with pytest.raises(InputError, match="at most 100,000 bytes"):
        fetch(url, tmp_path)
    monkeypatch.setattr(remote, "MIN_BYTES_PER_S", 1 << 50)
    monkeypatch.setattr(remote, "SLOW_S", 0.0)
    monkeypatch.setattr(remote, "MAX_BYTES", 1 << 40)
    with pytest.raises(InputError, match="too slow"):
        fetch(url, tmp_path)
    assert len(behaviour.paths) == 6


def test_the_query_of_an_address_is_never_written_or_shown(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, behaviour = server
    signed_url = url + "&X-Amz-Signature=5ec4e7"
    caplog.set_level(logging.INFO)
    redacted_url = redact_url(signed_url)
    assert [redact_url(name) for name in (redacted_url, "-", "a?b@c", "https://h/a@2/b")] == [
        redacted_url,
        "-",
        "a?b@c",
        "https://h/a@2/b",
    ]
    assert "5ec4e7" not in redacted_url
    assert redacted_url.startswith(url.partition("?")[0] + "#")
    assert redact_url(url) != redacted_url
    (path,) = fetch_all((redacted_url,), tmp_path)
    assert behaviour.paths == [signed_url[signed_url.index("/some") :]]
    assert Path(path).read_bytes() == CONTENT
    behaviour.codes = [403]
    with pytest.raises(InputError, match="403") as refused_info:
        fetch_all((redacted_url,), tmp_path)
    behaviour.codes = [500] * 4
    with pytest.raises(InputError) as failed_info:
        fetch(signed_url, tmp_path)
    with pytest.raises(InputError, match="not kept") as unknown_info:
        fetch(redacted_url.replace(redacted_url[-4:], "0000"), tmp_path)
    with pytest.raises(ConfigError) as odd_info:
        fetch(signed_url + " x", tmp_path)
    behaviour.redirects = {signed_url[signed_url.index("/some") :]: "ftp://x/?again=5ec4e7"}
    with pytest.raises(InputError) as redirect_info:
        fetch(signed_url, tmp_path)
    texts = [
        str(info.value)
        for info in (refused_info, failed_info, unknown_info, odd_info, redirect_info)
    ] + [caplog.text]
    texts += [file.name + file.read_bytes().decode() for file in tmp_path.iterdir()]
    assert "attempt 1 of 4" in caplog.text
    assert not [text for text in texts if "5ec4e7" in text]


@pytest.mark.parametrize("url", ["https://lab:5ec4e7@example.org/x.fa", "http://5ec4e7@h/x"])
def test_an_address_with_a_password_is_refused_without_showing_it(tmp_path: Path, url: str) -> None:
    for use in (lambda: fetch(url, tmp_path), lambda: redact_url(url)):
        with pytest.raises(ConfigError, match="password") as error_info:
            use()
        assert "5ec4e7" not in str(error_info.value)


def open_full_disk(path: Path, *, append: bool) -> BinaryIO:
    """Open a device of the kernel on which each write fails because there is no space left."""
    assert path.name.endswith(".part")
    return Path("/dev/full").open("ab" if append else "wb")


def test_a_full_disk_is_not_reported_as_a_network_error(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, behaviour = server
    fetch(url, tmp_path)
    behaviour.etag = '"new"'
    monkeypatch.setattr("virnuc_core.reads.remote.open_to_write", open_full_disk)
    with pytest.raises(
        StorageError, match=r"part: No space left on device; .* free there; make room"
    ):
        fetch(url, tmp_path)
    assert len(behaviour.paths) == 2


def test_no_download_is_written_through_a_link(server: Server, tmp_path: Path) -> None:
    url, behaviour = server
    name = fetch(url, tmp_path).name
    behaviour.etag = '"new"'
    private = tmp_path / "private"
    private.write_text("precious")
    (tmp_path / f"{name}.part").symlink_to(private)
    with pytest.raises(UnsafeFileError, match=r"part: is a symbolic link"):
        fetch(url, tmp_path)
    assert private.read_text() == "precious"


# NCBI


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Requests to NCBI, which is played from here: it knows NC_1.1 and NC_2.1 only."""
    requests: list[dict[str, str]] = []

    def answer(
        address: str, headers: object, query: dict[str, str]
    ) -> AbstractContextManager[httpx.Response]:
        assert address.startswith("https://eutils.ncbi.nlm.nih.gov/")
        requests.append(query)
        records = {"NC_000001": ">NC_000001.1 one\nACGT\n", "NC_000002": ">NC_000002.1 two\nGG\n"}
        text = "".join(records.get(name.split(".")[0], "") for name in query["id"].split(","))
        length = {"Content-Length": str(len(text))}
        stream = httpx.ByteStream(text.encode())
        return nullcontext(httpx.Response(200, headers=length, stream=stream))

    monkeypatch.setattr(remote, "_request", answer)
    return requests


def test_accessions_are_fetched_once_into_one_file(
    tmp_path: Path, asked: list[dict[str, str]]
) -> None:
    accessions = "ncbi:NC_000001.1, NC_000002"
    (path,) = fetch_all((accessions,), tmp_path, email="lab@example.org")
    assert Path(path).read_text() == ">NC_000001.1 one\nACGT\n>NC_000002.1 two\nGG\n"
    assert (asked[0]["id"], asked[0]["rettype"], asked[0]["email"]) == (
        "NC_000001.1,NC_000002",
        "fasta",
        "lab@example.org",
    )
    assert fetch_all((accessions,), tmp_path) == (path,)
    assert len(asked) == 1


@pytest.mark.usefixtures("asked")
def test_unknown_and_invalid_accessions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing for NC_000009\.1"):
        fetch_accessions(["NC_000001.1", "NC_000009.1"], tmp_path, email="lab@example.org")
    for wrong in (["../x"], [""], ["hello world"]):
        with pytest.raises(ConfigError, match="not an NCBI accession"):
            fetch_accessions(wrong, tmp_path, email="lab@example.org")
    with pytest.raises(ConfigError, match="mail address"):
        fetch_accessions(["NC_000001.1"], tmp_path, email=None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (httpx.ConnectError("Name or service not known"), "offline"),
        (TimeoutError("timed out"), "offline"),
    ],
)
def test_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(remote, "_request", refuse)
    with pytest.raises(InputError, match=words) as error_info:
        fetch_accessions(["NC_045512.2"], tmp_path, email="lab@example.org")
    assert "\n" not in str(error_info.value)
    assert list(tmp_path.iterdir()) == []
