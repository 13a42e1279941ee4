"""Whole commands with proxies in the environment: servers and nodes that they start need none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .processes import PATIENCE_S, ROOT, VIRNUC, own_server
from .recording_proxy import READS, Proxy


@pytest.fixture
def environment(tmp_path: Path, database: Path) -> dict[str, str]:
    """The environment of a command, without proxies."""
    variables = own_server(tmp_path / "home", database)
    return {name: value for name, value in variables.items() if not name.lower().endswith("_proxy")}


def predict(
    reads: object, out_dir: Path, models: Path, environment: dict[str, str], *words: str
) -> str:
    """Run a prediction, and return what it printed. It must succeed."""
    command = (*VIRNUC, "predict", str(reads), "-o", str(out_dir), "--models", str(models))
    process = subprocess.run(
        (*command, "--no-progress", *words),
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    printed = process.stdout + process.stderr
    assert process.returncode == 0, printed
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("no_proxy", [None, "", "[::1]:80, *.example.org;"])
def test_a_temporary_server_is_reached_without_a_proxy(
    no_proxy: str | None,
    proxy: Proxy,
    environment: dict[str, str],
    few_reads: Path,
    models: Path,
    tmp_path: Path,
) -> None:
    variables = proxy.variables
    if no_proxy is not None:
        variables |= {"no_proxy": no_proxy, "NO_PROXY": no_proxy}
    printed = predict(
        few_reads, tmp_path / "run", models, environment | variables, "--devices", "cpu:1"
    )
    assert "goes on without a Prefect server" not in printed
    assert proxy.requests == []


@pytest.mark.slow
@pytest.mark.parametrize("address", ["socks5h://127.0.0.1:9", "socks://127.0.0.1:9"])
def test_a_socks_proxy_ends_no_run(
    address: str, environment: dict[str, str], few_reads: Path, models: Path, tmp_path: Path
) -> None:
    variables = {"ALL_PROXY": address, "all_proxy": address}
    printed = predict(
        few_reads, tmp_path / "run", models, environment | variables, "--devices", "cpu:1"
    )
    assert "is not used" not in printed  # nothing was read from another machine


@pytest.mark.slow
def test_nodes_of_this_machine_are_reached_without_a_proxy(
    proxy: Proxy, environment: dict[str, str], few_reads: Path, models: Path, tmp_path: Path
) -> None:
    words = ("--cluster", "local:1", "--devices", "cpu:1", "--no-prefect")
    predict(few_reads, tmp_path / "run", models, environment | proxy.variables, *words)
    assert proxy.requests == []


def test_reads_of_another_machine_come_through_the_proxy(
    proxy: Proxy, environment: dict[str, str], models: Path, tmp_path: Path
) -> None:
    words = ("--devices", "cpu:1", "--no-prefect")
    predict(READS, tmp_path / "run", models, environment | proxy.variables, *words)
    assert proxy.requests == [f"GET {READS} HTTP/1.1"]
    assert (tmp_path / "run" / "reads.tsv").read_text().count("read1") == 1


def test_who_has_a_proxy_that_cannot_be_used_is_told_when_reads_are_fetched(
    environment: dict[str, str], models: Path, tmp_path: Path
) -> None:
    variables = {"ALL_PROXY": "socks5://me:secret@127.0.0.1:9"}
    command = (*VIRNUC, "predict", "http://reads.invalid/few.fasta", "-o", str(tmp_path / "run"))
    process = subprocess.run(
        (*command, "--models", str(models), "--no-prefect", "--devices", "cpu:1"),
        env=environment | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    printed = " ".join((process.stdout + process.stderr).split())
    assert process.returncode != 0
    assert "ALL_PROXY is not used: it needs the package socksio" in printed
    assert "secret" not in printed
