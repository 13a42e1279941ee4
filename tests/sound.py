"""Do the pinned versions fit together? `make sound` makes Prefect's server and lets its scheduler plan runs.

`pip check` passes with a server that cannot start, and with one whose scheduler fails every minute.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from datetime import timedelta


async def planned_runs() -> int:
    """Number of runs that the scheduler plans for a deployment, in an empty database."""
    from prefect import flow
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import IntervalSchedule
    from prefect.server.api.server import create_app
    from prefect.server.services.scheduler import schedule_deployments, schedule_recent_deployments

    @flow
    def nothing() -> None:
        """Never runs."""

    async with PrefectClient(create_app(ephemeral=True)) as client:
        hourly = DeploymentScheduleCreate(schedule=IntervalSchedule(interval=timedelta(hours=1)))
        await client.create_deployment(await client.create_flow(nothing), "hourly", schedules=[hourly])
        await schedule_deployments()
        await schedule_recent_deployments()
        return len(await client.read_flow_runs())


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {
            "PREFECT_HOME": home,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_LOGGING_LEVEL": "ERROR",
        }
        os.environ.pop("PREFECT_API_URL", None)
        planned = asyncio.run(planned_runs())
    assert planned > 0, "Prefect's scheduler planned no run for an hourly deployment"
    print(f"Prefect's server starts, and its scheduler plans: {planned} runs of an hourly deployment")


if __name__ == "__main__":
    main()
