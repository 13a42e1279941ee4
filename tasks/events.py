"""Events for automations."""

from collections.abc import Mapping
from typing import Any

from prefect.events import emit_event

from virnuc.tasks.server_connection import connection, with_server


def emit(event: str, resource: str, name: str, payload: Mapping[str, Any]) -> None:
    """Send `virnuc.<event>` about `virnuc.<resource>`; Prefect adds the flow run as a related resource."""
    if with_server():
        with connection.reporting(f"event {event}"):
            about = {"prefect.resource.id": f"virnuc.{resource}", "prefect.resource.name": name}
            emit_event(event=f"virnuc.{event}", resource=about, payload=dict(payload))
