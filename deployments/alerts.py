"""`make alerts BLOCK=slack-webhook/oncall`: the automations of alerts.yaml, each sending a message by that block.

An automation of the same name is replaced, so that the command can be given again with another block.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import PauseDeployment, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

FILE: Final = Path(__file__).with_name("alerts.yaml")
PAUSING: Final = "virnuc.criterion.fail"


def automation(row: dict[str, Any], block: Any, *, pause: bool) -> AutomationCore:
    """One automation: it sends `subject` and `body` at once, each time its event comes."""
    trigger = EventTrigger(**row["trigger"], posture=Posture.Reactive, threshold=1, within=0)
    actions: list[Any] = [SendNotification(block_document_id=block, subject=row["subject"], body=row["body"])]
    if pause and PAUSING in trigger.expect:
        actions.append(PauseDeployment(source="inferred", deployment_id=None))
    return AutomationCore(name=row["name"], description=row["description"], trigger=trigger, actions=actions)


def create(client: SyncPrefectClient, slug: str, *, pause: bool) -> list[str]:
    """Names of the automations that now send by the block `TYPE/NAME`. Raises: `ObjectNotFound` where there is none."""
    kind, _, name = slug.partition("/")
    block = client.read_block_document_by_name(name, kind).id
    made = [automation(row, block, pause=pause) for row in yaml.safe_load(FILE.read_text())]
    for one in made:
        for old in client.read_automations_by_name(one.name):
            client.delete_automation(old.id)
        client.create_automation(one)
    return [one.name for one in made]


if __name__ == "__main__":
    slug, pause = sys.argv[1], sys.argv[2:] == ["--pause"]
    with get_client(sync_client=True) as server:
        try:
            print("\n".join(create(server, slug, pause=pause)))
        except ObjectNotFound:
            sys.exit(
                f"{slug} is no block of this server; `prefect block ls` names them (TYPE/NAME, as slack-webhook/oncall)"
            )
