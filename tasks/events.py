"""One event per verdict, for automations that mail, chat or start something when a criterion fails.

| event | resource | payload |
| --- | --- | --- |
| `virnuc.criterion.<pass, fail, projected, not-run>` | `virnuc.criterion.<id>` | value, target, profile, report |
| `virnuc.validation.passed`, `virnuc.validation.failed` | `virnuc.validation.<profile>` | met, asked, failed, report |
| `virnuc.prediction.done` | `virnuc.prediction.<folder>` | reads, viral, run |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect.events import emit_event


def emit(event: str, resource: str, name: str, payload: Mapping[str, Any]) -> None:
    """Send `virnuc.<event>` about `virnuc.<resource>`; Prefect adds the flow run as a related resource."""
    emit_event(
        event=f"virnuc.{event}",
        resource={"prefect.resource.id": f"virnuc.{resource}", "prefect.resource.name": name},
        payload=dict(payload),
    )
