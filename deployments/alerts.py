"""`make alerts BLOCK=slack-webhook/oncall`: the automations of alerts.yaml, each sending a message by that block.

An automation of the same name is replaced, so that the command can be given again with another block."""

import sys
from pathlib import Path
from typing import Final

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import PauseDeployment, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

PAUSING: Final = "virnuc.criterion.fail"


def create(client: SyncPrefectClient, slug: str, *, pause: bool) -> None:
    """Make and name automations that send `subject` and `body` by the block `TYPE/NAME` each time their event comes.
    Raises: `ObjectNotFound` where there is no such block."""
    kind, _, name = slug.partition("/")
    block = client.read_block_document_by_name(name, kind).id
    for row in yaml.safe_load(Path(__file__).with_name("alerts.yaml").read_text()):
        trigger = EventTrigger(
            **row.pop("trigger"), posture=Posture.Reactive, threshold=1, within=0
        )
        send = SendNotification(
            block_document_id=block, subject=row.pop("subject"), body=row.pop("body")
        )
        paused = [PauseDeployment(source="inferred", deployment_id=None)] * (
            pause and PAUSING in trigger.expect
        )
        made = AutomationCore(**row, trigger=trigger, actions=[send, *paused])
        for old in client.read_automations_by_name(made.name):
            client.delete_automation(old.id)
        client.create_automation(made)
        print(made.name)


if __name__ == "__main__":
    slug, pause = sys.argv[1], sys.argv[2:] == ["--pause"]
    with get_client(sync_client=True) as server:
        try:
            create(server, slug, pause=pause)
        except ObjectNotFound:
            sys.exit(
                f"{slug} is no block of this server; `prefect block ls` names them (as slack-webhook/oncall)"
            )
