"""Ctrl-C at a terminal reaches every process of the group, Prefect's embedded server too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest


@pytest.mark.timeout(240)
def test_ctrl_c_ends_an_ad_hoc_run_at_once_and_leaves_nothing(tmp_path: Path, many_reads: Path, models: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PREFECT_HOME": str(tmp_path / "prefect")}
    out, log = tmp_path / "run", tmp_path / "log"
    words = [sys.executable, "-m", "flows.cli", "predict", str(many_reads), "-o", str(out), "--models", str(models)]
    words += ["--devices", "cpu:1", "--shard-tokens", "8192", "--token-budget", "2048"]
    with log.open("wb") as handle:
        run = subprocess.Popen(words, stdout=handle, stderr=handle, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 180
        while len(list((out / "shards").glob("0*.h5"))) < 2:
            assert run.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        family = psutil.Process(run.pid).children(recursive=True)
        assert any("uvicorn" in " ".join(child.cmdline()) for child in family), "no embedded server to spare"
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(30) == 130, log.read_text()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive
        assert "Traceback" not in log.read_text()
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
