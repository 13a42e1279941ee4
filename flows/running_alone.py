"""The one line that says why a run goes on without a Prefect server."""

import logging
from typing import Final

from virnuc_core.confidential import redact
from virnuc_core.errors import VirnucError

MAX_REASON_LENGTH: Final = 300  # an error of Prefect's may hold pages of explanations
log = logging.getLogger(__name__)


def warn_of_running_alone(error: BaseException) -> None:
    """Log the warning that the run goes on without a Prefect server.

    Args:
        error: Why no server can show the run.
    """
    log.warning(
        "the run goes on without a Prefect server, and is not in the UI: %s",
        reason_in_one_line(error),
    )


def reason_in_one_line(error: BaseException) -> str:
    """Return what an error says, without line ends and shortened.

    An error that is not ours may say little without its type, so it begins with that. Passwords
    are left out.
    """
    if isinstance(error, VirnucError | OSError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    # Half a password, after the text was cut, would not be recognised.
    text = " ".join(redact(text).split())
    if len(text) > MAX_REASON_LENGTH and not isinstance(error, VirnucError):
        return f"{text[:MAX_REASON_LENGTH]} …"
    return text
