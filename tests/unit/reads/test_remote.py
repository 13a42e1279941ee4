"""Downloads against a server of our own on the loopback: going on, refusals; NCBI answered from here."""

from __future__ import annotations

import http.server
import io
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from virnuc_core.errors import ConfigError, InputError
from virnuc_core.reads import remote
from virnuc_core.reads.remote import fetch, fetch_accessions, fetch_all
from virnuc_core.reads.sources import is_remote

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


@pytest.fixture
def server() -> Iterator[tuple[str, Behaviour]]:
    behaviour = Behaviour()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            behaviour.requests.append(dict(self.headers))
            if behaviour.codes:
                self.send_error(behaviour.codes.pop(0))
                return
            if behaviour.etag is not None and self.headers.get("If-None-Match") == behaviour.etag:
                self.send_response(304)
                self.end_headers()
                return
            start, content = 0, behaviour.content
            wanted = self.headers.get("Range")
            if wanted and behaviour.ranges and self.headers.get("If-Range") == behaviour.etag:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(content):
                    self.send_error(416)
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(content) - start))
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
    assert (path.name, path.read_bytes()) == ("reads_one.fa", CONTENT)
    assert not list(tmp_path.glob("*.part"))


def test_it_goes_on_where_it_broke_off(server: Server, tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.cuts = [100_000, 50_000]
    assert fetch(url, tmp_path).read_bytes() == CONTENT
    assert [request.get("Range") for request in behaviour.requests] == [None, "bytes=100000-", "bytes=150000-"]


def test_it_goes_on_in_a_later_call(server: Server, tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.cuts = [100_000]
    broken_off(url, tmp_path)
    assert not (tmp_path / "reads_one.fa").exists()
    assert fetch(url, tmp_path).read_bytes() == CONTENT
    assert behaviour.requests[-1]["Range"] == "bytes=100000-"


def test_it_begins_again_when_the_content_changed_meanwhile(server: Server, tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.cuts = [100_000]
    broken_off(url, tmp_path)
    behaviour.content, behaviour.etag = CONTENT[::-1], '"two"'
    assert fetch(url, tmp_path).read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_it_begins_again_without_a_strong_tag(server: Server, tmp_path: Path, etag: str | None) -> None:
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
    (tmp_path / "reads_one.fa.part").write_bytes(bytes(10_000_000))
    assert fetch(url, tmp_path).read_bytes() == CONTENT
    assert [request.get("Range") for request in behaviour.requests] == [None, "bytes=10000000-", None]


def test_a_current_file_is_not_downloaded_again(server: Server, tmp_path: Path) -> None:
    url, behaviour = server
    path = fetch(url, tmp_path)
    before = path.stat().st_mtime_ns
    fetch(url, tmp_path)
    assert behaviour.requests[-1]["If-None-Match"] == '"one"'
    assert path.stat().st_mtime_ns == before
    behaviour.content, behaviour.etag = b">new\nA\n", '"new"'
    assert fetch(url, tmp_path).read_bytes() == b">new\nA\n"


def test_a_file_changed_on_disk_is_fetched_again(server: Server, tmp_path: Path) -> None:
    url, _ = server
    fetch(url, tmp_path).write_bytes(b"spoilt")
    assert fetch(url, tmp_path).read_bytes() == CONTENT


def test_server_errors_are_tried_again_and_refusals_are_not(server: Server, tmp_path: Path) -> None:
    url, behaviour = server
    behaviour.codes = [503, 500]
    assert fetch(url, tmp_path).read_bytes() == CONTENT
    assert len(behaviour.requests) == 3
    behaviour.codes = [404]
    with pytest.raises(InputError, match="404"):
        fetch(url.replace("one", "two"), tmp_path)
    assert len(behaviour.requests) == 4


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="offline") as caught:
        fetch("http://127.0.0.1:9/reads.fa", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["ftp://x/y.fa", "file:///etc/passwd", "reads.fa"])
def test_only_http(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="only http"):
        fetch(url, tmp_path)


def test_names_cannot_leave_the_folder(server: Server, tmp_path: Path) -> None:
    url, _ = server
    base = url[: url.index("/some")]
    for tail in ("/..%2F..%2Fetc%2Fpasswd", "/.hidden", "/", "/%2e%2e"):
        path = fetch(base + tail, tmp_path / "in")
        assert path.parent == tmp_path / "in"
        assert not path.name.startswith(".")


def test_fetch_all_leaves_files_alone(server: Server, tmp_path: Path) -> None:
    url, _ = server
    assert fetch_all(("a.fa", "-", url), tmp_path) == ("a.fa", "-", str(tmp_path / "reads_one.fa"))
    assert [is_remote(name) for name in ("a.fa", "-", url, "ncbi:NC_045512.2")] == [False, False, True, True]


# NCBI


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Requests to NCBI, which is played from here: it knows NC_1.1 and NC_2.1 only."""
    requests: list[dict[str, str]] = []

    def answer(address: str, sent: bytes, timeout: float) -> io.BytesIO:
        assert address.startswith("https://eutils.ncbi.nlm.nih.gov/")
        assert timeout > 0
        query = dict(urllib.parse.parse_qsl(sent.decode()))
        requests.append(query)
        known = {"NC_000001": ">NC_000001.1 one\nACGT\n", "NC_000002": ">NC_000002.1 two\nGG\n"}
        return io.BytesIO("".join(known.get(name.split(".")[0], "") for name in query["id"].split(",")).encode())

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    return requests


def test_accessions_come_as_one_file_once(tmp_path: Path, asked: list[dict[str, str]]) -> None:
    wanted = "ncbi:NC_000001.1, NC_000002"
    (path,) = fetch_all((wanted,), tmp_path, email="lab@example.org")
    assert Path(path).read_text() == ">NC_000001.1 one\nACGT\n>NC_000002.1 two\nGG\n"
    assert (asked[0]["id"], asked[0]["rettype"], asked[0]["email"]) == (
        "NC_000001.1,NC_000002",
        "fasta",
        "lab@example.org",
    )
    assert fetch_all((wanted,), tmp_path) == (path,)
    assert len(asked) == 1


@pytest.mark.usefixtures("asked")
def test_accessions_that_are_missing_or_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing for NC_000009\.1"):
        fetch_accessions(["NC_000001.1", "NC_000009.1"], tmp_path, email="lab@example.org")
    for wrong in (["../x"], [""], ["hello world"]):
        with pytest.raises(ConfigError, match="no NCBI accession"):
            fetch_accessions(wrong, tmp_path, email="lab@example.org")
    with pytest.raises(ConfigError, match="mail address"):
        fetch_accessions(["NC_000001.1"], tmp_path, email=None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (urllib.error.URLError("Name or service not known"), "offline"),
        (TimeoutError("timed out"), "offline"),
        (urllib.error.HTTPError("http://x", 400, "Bad Request", None, None), "400"),  # type: ignore[arg-type]
    ],
)
def test_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(InputError, match=words) as caught:
        fetch_accessions(["NC_045512.2"], tmp_path, email="lab@example.org")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
