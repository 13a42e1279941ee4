"""Who can connect to a cluster that virnuc starts, where it listens, and what it leaves behind."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("distributed")
import dask
from cryptography import x509
from distributed.utils import get_ip

from tests.changing_folders import content_of, paths_below
from virnuc_core.config import ClusterSpec
from virnuc_core.engine.cluster_security import (
    OWNER,
    PREFIX,
    configured_security,
    folder_for_jobs,
    is_exposed,
    make_certificate,
    private_folder,
    temporary_security,
)
from virnuc_core.engine.dask_clusters import connect
from virnuc_core.errors import ConfigError, DeviceError

NOBODY = 65534
# dask-jobqueue's jobs of this machine leave their subprocess objects and pipes to the garbage collector
UNTIDY = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
INTRUDER = """
    import os, sys
    from distributed import Client, Security
    import distributed.protocol

    port, uid, key = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    host, patience_s = sys.argv[4], float(sys.argv[5])
    strange = Security.temporary()
    if uid >= 0:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        try:
            open(key)
            sys.exit("the key can be read")
        except PermissionError:
            pass
    for address, security in ((f"tcp://{host}:{port}", None), (f"tls://{host}:{port}", strange)):
        try:
            with Client(address, security=security, timeout=patience_s) as client:
                sys.exit(f"{address}: ran code as {client.run_on_scheduler(os.getuid)}")
        except (OSError, TypeError):
            print("refused")
"""


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands for /tmp, here and in child processes."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A YAML file for Slurm, whose commands start and end jobs as processes of this machine."""
    commands = tmp_path / "bin"
    commands.mkdir()
    sbatch = f"""
        #!/bin/sh
        cp "$1" {tmp_path}/job.$$
        setsid bash {tmp_path}/job.$$ > {tmp_path}/job.$$.log 2>&1 &
        echo "Submitted batch job $!"
    """
    for name, script in (("sbatch", sbatch), ("scancel", '\n#!/bin/sh\nkill -9 -- "-$1"\n')):
        (commands / name).write_text(textwrap.dedent(script)[1:])
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    shared_dir = tmp_path / "shared"
    shared_dir.mkdir()
    return yaml_file(
        tmp_path, "slurm", f"shared-temp-directory: {shared_dir}", f"local-directory: {shared_dir}"
    )


def yaml_file(folder: Path, kind: str, *lines: str, top: str = "") -> str:
    """Write the settings of a batch system with jobs of one core."""
    settings = ["cores: 1", "processes: 1", "memory: 1GB", *lines]
    file = folder / f"{kind}.yaml"
    file.write_text(f"jobqueue:\n  {kind}:\n" + "".join(f"    {line}\n" for line in settings) + top)
    return str(file)


def with_cluster(cluster: str, look: Callable[[Any], Awaitable[None]], nodes: int = 2) -> None:
    """Start a cluster, wait for its nodes, and pass its client on."""

    async def run() -> None:
        async with connect(ClusterSpec(cluster=cluster, nodes=str(nodes))) as connection:
            client = connection.client
            connection.request_nodes(nodes)
            await client.wait_for_workers(nodes, timeout=120)
            await look(client)

    asyncio.run(run())


def processes_of(client: Any) -> list[psutil.Process]:
    """The processes of a cluster, by the files in its private folder, which are on their command lines."""
    folder = str(Path(client.security.tls_client_key).parent)
    processes = [psutil.Process()]
    for process in psutil.process_iter():
        try:
            if process != processes[0] and folder in " ".join(process.cmdline()):
                processes += [process, *process.children(recursive=True)]
        except psutil.Error:  # it has ended
            continue
    return list(dict.fromkeys(processes))


def listening(processes: list[psutil.Process]) -> list[tuple[str, int]]:
    addresses = []
    for process in processes:
        connections = []
        with suppress(psutil.NoSuchProcess):
            connections = process.net_connections("inet")
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                addresses.append((connection.laddr.ip, connection.laddr.port))
    return addresses


def semaphores(processes: list[psutil.Process]) -> set[Path]:
    """The named semaphores in use, which other processes of this machine may have, too."""
    names = set()
    for process in processes:
        for line in process_file(process, "maps").decode(errors="replace").splitlines():
            if "/dev/shm/sem." in line:
                names.add(Path(line.split(maxsplit=5)[5].removesuffix(" (deleted)")))
    return {name for name in names if name.exists()}


def process_file(process: psutil.Process, name: str) -> bytes:
    """Return what the system tells about a process in a file of /proc; nothing if it has ended."""
    try:
        return Path(f"/proc/{process.pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def speaks_http(address: tuple[str, int]) -> bool:
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        try:
            return connection.recv(5) == b"HTTP/"
        except OSError:
            return False


def intrude(address: tuple[str, int], key: str, uid: int, patience_s: float = 2.0) -> list[str]:
    """Try to connect from another process without the certificate.

    Args:
        address: Where.
        key: The file with the key of the certificate.
        uid: The user of the other process; -1 for the present one.
        patience_s: How long it tries. Who is refused tries as long as that.

    Returns:
        What the process says.
    """
    host, port = address
    words = [sys.executable, "-c", textwrap.dedent(INTRUDER), str(port), str(uid), key, host]
    words.append(str(patience_s))
    quiet = {**os.environ, "DASK_LOGGING__DISTRIBUTED": "critical"}
    result = subprocess.run(
        words, capture_output=True, text=True, timeout=120, env=quiet, check=False
    )
    return (
        [*result.stdout.split(), *result.stderr.split("\n")[-2:-1]]
        if result.returncode
        else result.stdout.split()
    )


@UNTIDY
@pytest.mark.parametrize(
    "kind",
    [
        "local:2",
        pytest.param("jobs of this machine", marks=pytest.mark.slow),
        pytest.param("slurm", marks=pytest.mark.slow),
    ],
)
def test_only_holders_of_the_certificate_connect_and_nothing_is_left(
    tmp_path: Path,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    kind: str,
) -> None:
    proxy = socket.create_server(("127.0.0.1", 0))
    request.addfinalizer(proxy.close)
    for name in (
        "http_proxy",
        "HTTP_PROXY",
        "https_proxy",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
    cluster, host = kind, "127.0.0.1"
    if kind == "jobs of this machine":
        cluster = yaml_file(tmp_path, "local")
    elif kind == "slurm":
        cluster, host = request.getfixturevalue("slurm"), get_ip()
    visited = set[Path]()
    folders = list[Path]()

    async def look(client: Any) -> None:
        assert client.scheduler.address.startswith("tls://")
        assert isinstance(await client.run_on_scheduler(os.getpid), int)  # with the certificate
        key = Path(client.security.tls_client_key)
        folders.append(key.parent)
        assert key.parent.stat().st_mode & 0o777 == 0o700
        assert key.stat().st_mode & 0o777 == 0o600

        processes = processes_of(client)
        sockets = [address for address in listening(processes) if address != proxy.getsockname()]
        assert {ip for ip, _ in sockets} == {host}
        assert len(sockets) == 5  # scheduler, two nannies, two Dask workers
        assert not any([await asyncio.to_thread(speaks_http, address) for address in sockets])
        for address in sockets[:1] + sockets[-1:]:
            for uid in (-1, NOBODY) if os.geteuid() == 0 else (-1,):
                assert await asyncio.to_thread(intrude, address, str(key), uid) == [
                    "refused",
                    "refused",
                ]

        secret = key.read_text().splitlines()[1].encode()
        for process in processes:
            assert secret not in process_file(process, "cmdline")
            assert secret not in process_file(process, "environ")
        for file in paths_below(tmp_path):  # Dask makes and removes some of them
            assert file == key or secret not in content_of(file)
        visited.update(semaphores(processes))

    with_cluster(cluster, look)
    proxy.setblocking(False)
    with pytest.raises(BlockingIOError):
        proxy.accept()
    assert visited
    deadline_s = time.monotonic() + (
        0 if kind == "local:2" else 30
    )  # jobs end a moment after their cluster
    while any(name.exists() for name in visited) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not [name for name in visited if name.exists()]
    assert list(scratch.iterdir()) == []
    assert not [folder for folder in folders if folder.exists()]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_local_cluster_leaves_nothing_after_the_next_start(
    scratch: Path, stopped: bool
) -> None:
    """Though its Dask workers were stopped, and could not end by themselves."""
    program = """
        import asyncio
        from virnuc_core.config import ClusterSpec
        from virnuc_core.engine.dask_clusters import connect

        async def run():
            async with connect(ClusterSpec(cluster="local:1")) as connection:
                await connection.client.wait_for_workers(1)
                print("ready", flush=True)
                await asyncio.sleep(600)

        asyncio.run(run())
    """
    words = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        family = psutil.Process(child.pid).children(recursive=True)
        used = semaphores(family)
        if stopped:
            family[-1].suspend()
        child.kill()
    assert used
    if stopped:
        family[-1].resume()
    _, alive = psutil.wait_procs(family, timeout=120)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert not [name for name in used if name.exists()]
    (leftover,) = scratch.glob(f"{PREFIX}*")
    with private_folder(scratch):
        assert not leftover.exists()


def test_only_folders_of_ended_processes_are_removed(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    with private_folder(tmp_path) as living:
        namespace, _, ticks = (living / OWNER).read_text().splitlines()
        names = {
            "ended": process.stdout.decode().strip(),
            "elsewhere": "1",
            "unowned": "",
            "outside": "",
        }
        for name, pid in names.items():
            (folder := tmp_path / f"{PREFIX}{name}").mkdir()
            if pid:
                host = namespace if name == "ended" else "another machine"
                (folder / OWNER).write_text(f"{host}\n{pid}\n{ticks}\n")
        (tmp_path / f"{PREFIX}outside").rename(tmp_path / "outside")
        shutil.copy(tmp_path / f"{PREFIX}ended" / OWNER, tmp_path / "outside" / OWNER)
        (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "outside")
        with private_folder(tmp_path):
            leftovers = {path.name.removeprefix(PREFIX) for path in tmp_path.iterdir()}
        assert living.exists()
        assert {"elsewhere", "unowned", "outside", "link"} <= leftovers
        assert "ended" not in leftovers


@pytest.mark.parametrize(
    ("address", "exposed"),
    [
        ("tcp://127.0.0.1:8786", False),
        ("tcp://localhost:8786", False),
        ("tcp://[::1]:8786", False),
        ("tls://203.0.113.1:8786", False),
        ("tcp://203.0.113.1:8786", True),
        ("tcp://[2001:db8::1]:8786", True),
        ("tcp://no-such-host.invalid:8786", True),
    ],
)
def test_a_scheduler_without_tls_is_exposed_unless_it_is_on_loopback(
    address: str, exposed: bool
) -> None:
    assert is_exposed(address) is exposed


@pytest.mark.parametrize(("host", "warnings"), [(get_ip(), 1), ("127.0.0.1", 0)])
def test_a_scheduler_without_tls_is_used_with_one_warning(
    host: str, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if warnings and host.startswith("127."):
        pytest.skip("this machine has no other address")
    monkeypatch.setattr("virnuc_core.engine.dask_clusters.SCHEDULER_S", 0.3)
    address = f"tcp://{host}:9"

    async def unused(_: Any) -> None:
        raise AssertionError("nothing listens there")

    with (
        caplog.at_level(logging.WARNING, "virnuc_core"),
        pytest.raises(DeviceError, match="no Dask scheduler"),
    ):
        with_cluster(address, unused)
    messages = [record.getMessage() for record in caplog.records if "no TLS" in record.getMessage()]
    assert len(messages) == warnings
    assert all(address in message for message in messages)


def test_a_certificate_holds_where_a_clock_is_late_and_each_is_another() -> None:
    certificates = [
        x509.load_pem_x509_certificate(make_certificate()[0].encode()) for _ in range(2)
    ]
    assert certificates[0].not_valid_before_utc < datetime.now(UTC) - timedelta(hours=23)
    assert certificates[0].not_valid_after_utc > datetime.now(UTC) + timedelta(days=364)
    assert certificates[0].public_key() != certificates[1].public_key()


@UNTIDY
def test_certificates_of_dasks_settings_are_used_if_they_serve_all_roles(
    tmp_path: Path, scratch: Path
) -> None:
    own = temporary_security(tmp_path)
    roles = {
        role: {"cert": own.tls_client_cert, "key": own.tls_client_key}
        for role in ("client", "scheduler")
    }
    settings = {"ca-file": own.tls_ca_file, **roles}
    with dask.config.set({"distributed.comm.tls": settings}):
        assert configured_security() is None
    pem_file = tmp_path / "both.pem"
    pem_file.write_text(
        (tmp_path / "certificate.pem").read_text() + (tmp_path / "key.pem").read_text()
    )
    lines = f"distributed: {{comm: {{tls: {{ca-file: {own.tls_ca_file}"
    for role in ("client", "scheduler", "worker"):
        lines += f", {role}: {{cert: {pem_file}}}"

    async def look(client: Any) -> None:
        assert client.security.tls_client_cert == str(pem_file)
        assert client.scheduler.address.startswith("tls://")

    with_cluster(yaml_file(tmp_path, "local", top=lines + "}}}\n"), look, nodes=1)
    assert list(scratch.iterdir()) == []


@UNTIDY
def test_tls_can_be_turned_off_by_name_with_a_warning(
    tmp_path: Path, scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def look(client: Any) -> None:
        address = client.scheduler.address
        assert address.startswith("tcp://127.0.0.1:")
        answer = await asyncio.to_thread(
            intrude, ("127.0.0.1", int(address.rpartition(":")[2])), "", -1, 60.0
        )
        assert "ran code as" in answer[-1]  # so the intruder of the other tests would notice

    config_text = "distributed: {comm: {require-encryption: false}}\n"
    with caplog.at_level(logging.WARNING, "virnuc_core"):
        with_cluster(yaml_file(tmp_path, "local", top=config_text), look, nodes=1)
    assert "turn TLS off" in caplog.text


@UNTIDY
def test_a_dashboard_that_is_asked_for_listens_where_the_scheduler_does(
    tmp_path: Path, scratch: Path
) -> None:
    async def look(client: Any) -> None:
        sockets = listening([psutil.Process()])
        assert {ip for ip, _ in sockets} == {"127.0.0.1"}
        answers = [await asyncio.to_thread(speaks_http, address) for address in sockets]
        assert answers.count(True) == 1

    options = "scheduler-options: {dashboard: true}"
    with_cluster(yaml_file(tmp_path, "local", options), look, nodes=1)


def test_the_folder_for_jobs_is_one_that_nodes_see_and_a_script_can_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, dir_with_space = tmp_path / "home", tmp_path / "two words"
    dir_with_space.mkdir()
    monkeypatch.setenv("HOME", str(home))
    assert folder_for_jobs("~/certificates", tmp_path) == home / "certificates"
    assert folder_for_jobs("$HOME", tmp_path) == home
    assert folder_for_jobs(None, tmp_path) == tmp_path
    assert folder_for_jobs(None, None) == folder_for_jobs(None, dir_with_space) == home
    with pytest.raises(ConfigError, match="shared-temp-directory"):
        folder_for_jobs(str(dir_with_space), None)
