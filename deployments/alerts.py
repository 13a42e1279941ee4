"""Automations that notify people. `make alerts BLOCK=slack-webhook/oncall` creates those of
`alerts.yaml`.

An automation of the same name is replaced, so the command can be given again with another block.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import PauseDeployment, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL

from virnuc_core.confidential import secrets_hidden

# What may become a link, a mention, an image, HTML or emphasis in a messenger, and what is sent
# instead. Slack, Teams, mail and webhooks have different rules, so no backslash or entity would
# be right for all of them. The other characters look alike and mean nothing.
PLAIN_TEXT: Final = {
    "<": "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}",
    ">": "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}",
    "&": "\N{FULLWIDTH AMPERSAND}",
    "[": "\N{FULLWIDTH LEFT SQUARE BRACKET}",
    "]": "\N{FULLWIDTH RIGHT SQUARE BRACKET}",
    "{": "\N{FULLWIDTH LEFT CURLY BRACKET}",
    "}": "\N{FULLWIDTH RIGHT CURLY BRACKET}",
    "@": "\N{FULLWIDTH COMMERCIAL AT}",
    "*": "\N{ASTERISK OPERATOR}",
    "~": "\N{TILDE OPERATOR}",
    "`": "'",
    "\\": "\N{FULLWIDTH REVERSE SOLIDUS}",
    "//": "\N{DIVISION SLASH}\N{DIVISION SLASH}",
    "www.": "www\N{ONE DOT LEADER}",
    "Www.": "Www\N{ONE DOT LEADER}",
    "WWW.": "WWW\N{ONE DOT LEADER}",
    "\n": " ",
    "\r": " ",
}
EXPRESSION: Final = re.compile(r"\{\{ (.+?) \}\}")  # in a template
MISSED_CRITERION: Final = "virnuc.criterion.fail"  # the event that may pause a deployment


def create(client: SyncPrefectClient, slug: str, *, pause: bool) -> None:
    """Create the automations of `alerts.yaml` on a server, and print their names.

    Those of the same name that the server has already are replaced.

    Args:
        client: A client of the server.
        slug: The block that sends the messages, as `TYPE/NAME`. A block is a setting that the
            server keeps, here the address and password of a messenger.
        pause: Also pause the deployment whose run missed a criterion.

    Raises:
        ObjectNotFound: The server has no such block.
    """
    block_type, _, block_name = slug.partition("/")
    block = client.read_block_document_by_name(block_name, block_type)
    for automation in _automations(block.id, pause=pause):
        for previous in client.read_automations_by_name(automation.name):
            client.delete_automation(previous.id)
        client.create_automation(automation)
        print(automation.name)


def _automations(block_id: Any, *, pause: bool) -> Iterator[AutomationCore]:
    """Yield the automations of `alerts.yaml`. Each acts every time its event comes.

    Args:
        block_id: The id of the block that sends the messages.
        pause: Also pause the deployment whose run missed a criterion.
    """
    text = Path(__file__).with_name("alerts.yaml").read_text(encoding="utf-8")
    for fields in yaml.safe_load(text):
        # React to each single event (threshold 1), without counting events within some time.
        trigger = EventTrigger(
            **fields.pop("trigger"), posture=Posture.Reactive, threshold=1, within=0
        )
        subject = with_plain_values(fields.pop("subject"))
        body = with_plain_values(fields.pop("body"))
        actions: list[Any] = [
            SendNotification(block_document_id=block_id, subject=subject, body=body)
        ]
        if pause and MISSED_CRITERION in trigger.expect:
            # "inferred": the deployment of the run from which the event came.
            actions.append(PauseDeployment(source="inferred", deployment_id=None))
        yield AutomationCore(**fields, trigger=trigger, actions=actions)


def with_plain_values(template: str) -> str:
    """Return a template of Prefect whose values are shown as plain text, whatever is in them.

    Names of files, samples and runs may contain anything. The server fills in the templates, and
    only the usual filters of Jinja exist there.

    Args:
        template: Our own text, with values as `{{ event.payload.reason }}`.
    """
    filters = " | string"
    for markup, plain_text in PLAIN_TEXT.items():
        # Jinja and JSON write these texts in the same way.
        filters += f" | replace({json.dumps(markup)}, {json.dumps(plain_text)})"
    # A function, because the filters have backslashes, which a text to insert may not have.
    return EXPRESSION.sub(lambda match: f"{{{{ ({match[1]}){filters} }}}}", template)


def main() -> None:
    """Run the command `python -m virnuc.deployments.alerts TYPE/NAME [--pause]`.

    TYPE/NAME is the block (a setting that the server keeps) that sends the messages. The process
    ends with an error if no server is named, or if the server has no such block.
    """
    if PREFECT_API_URL.value() is None:
        # Prefect would start a server here that answers every user of the machine.
        sys.exit("alerts are created on a running server; name it with PREFECT_API_URL")
    slug = sys.argv[1]
    pause = sys.argv[2:] == ["--pause"]
    # An error of Prefect's client names the address of the server, which may contain a password.
    hiding = secrets_hidden(streams=True, for_good=True)
    with hiding, get_client(sync_client=True) as server:
        try:
            create(server, slug, pause=pause)
        except ObjectNotFound:
            sys.exit(
                f"{slug} is no block of this server; "
                "`prefect block ls` names them (as slack-webhook/oncall)"
            )


if __name__ == "__main__":
    main()
