"""The mail address that NCBI asks for with each download.

It belongs to a person, and no result depends on it. So it is kept in the memory of this process, or
in the environment. It is in no file of a run, no log, and no database of a Prefect server.
"""

import os

from virnuc_core.confidential import EMAIL_VARIABLE, hide

_addresses: list[str] = []  # the newest one that this process was given, or empty


def keep_contact_address(address: str | None) -> None:
    """Remember the mail address for the downloads of this process.

    From here on, messages and log lines of this process do not show it.

    Args:
        address: The address. None or an empty text changes nothing.
    """
    if address:
        hide(address)
        _addresses[:] = [address]


def contact_address() -> str | None:
    """Return the mail address for downloads, or None if nobody gave one.

    It is the address that this process was given with `keep_contact_address`. If there is none, it
    is the one in the environment variable `VIRNUC_EMAIL`. Runs of a Prefect deployment get it this
    way, from the environment of Prefect's worker process.
    """
    if _addresses:
        return _addresses[0]
    address = os.environ.get(EMAIL_VARIABLE) or None
    hide(address)  # so that no message or log line shows it
    return address
