"""Events that automations react to, and that the UI lists."""

from collections.abc import Mapping
from typing import Any

from virnuc.tasks.server_use import with_server


def emit(event: str, resource: str, name: str, payload: Mapping[str, Any]) -> None:
    """Send an event, if there is a Prefect server. Prefect adds the flow run as a related resource.

    Args:
        event: What happened; it is sent as `virnuc.<event>`.
        resource: What it is about; it is sent as `virnuc.<resource>`.
        name: The resource's name for people.
        payload: Facts about the event.
    """
    if not with_server():
        return
    from prefect.events import emit_event

    from virnuc.tasks.server_connection import connection

    subject = {"prefect.resource.id": f"virnuc.{resource}", "prefect.resource.name": name}
    with connection.reporting(f"event {event}"):
        emit_event(event=f"virnuc.{event}", resource=subject, payload=dict(payload))
