"""Do the pinned versions fit together? `make sound` starts Prefect's server, whose scheduler then has to plan a run.

`pip check` passes with a server that cannot start, and with one whose scheduler fails every minute.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import httpx

PATIENCE_S = 120
FAILED = re.compile(r"^.*(?:\bERROR\b|Error: |Traceback).*$", re.MULTILINE)


def wait_for(what: str, log: Path) -> None:
    """Until `PREFECT_API_URL` answers."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            if httpx.get(f"{os.environ['PREFECT_API_URL']}/health", timeout=5).is_success:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline_s, f"{what}: not in {PATIENCE_S} s\n{log.read_text()}"
        time.sleep(0.2)


def planned_runs() -> int:
    """Number of runs that the server's scheduler, left to itself, plans for a deployment of every hour; 0: in vain."""
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import IntervalSchedule

    @flow
    def nothing() -> None:
        """Never runs."""

    hourly = DeploymentScheduleCreate(schedule=IntervalSchedule(interval=timedelta(hours=1)))
    with get_client(sync_client=True) as client:
        client.create_deployment(client.create_flow(nothing), "hourly", schedules=[hourly])
        deadline_s = time.monotonic() + PATIENCE_S
        while not (runs := client.read_flow_runs()) and time.monotonic() < deadline_s:
            time.sleep(0.5)
    return len(runs)


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {
            "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
            "PREFECT_HOME": home,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }
        log = Path(home, "server.log")
        words = [sys.executable, "-m", "prefect", "server", "start", "--port", port, "--no-ui"]
        with (
            log.open("wb") as log_file,
            subprocess.Popen(words, stdout=log_file, stderr=log_file) as server,
        ):
            try:
                wait_for("the server", log)
                num_planned = planned_runs()
            finally:
                server.terminate()
        errors = "\n".join(FAILED.findall(log.read_text()))
    assert num_planned > 0, f"Prefect's scheduler planned no run for an hourly deployment\n{errors}"
    assert not errors, errors
    print(
        f"Prefect's server and its services start, and its scheduler plans: {num_planned} runs of an hourly deployment"
    )


if __name__ == "__main__":
    main()
