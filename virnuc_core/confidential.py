"""Words that this process knows and must not show: passwords, keys, and a person's mail address.

`hide` remembers such a word, in the memory of this process only. `redact` removes all of them from
a text, and every user name and password from addresses (`https://user:password@host`). Inside
`secrets_hidden`, log lines, tracebacks and what is written to the terminal pass through `redact`,
whichever program wrote them. Messages of our own errors always do.
"""

import base64
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TextIO, cast
from urllib.parse import unquote

EMAIL_VARIABLE: Final = "VIRNUC_EMAIL"
# Variables of Prefect whose whole value is a secret.
_SECRET_VARIABLES: Final = (
    "PREFECT_API_AUTH_STRING",
    "PREFECT_API_KEY",
    "PREFECT_SERVER_API_AUTH_STRING",
    "PREFECT_SERVER_DATABASE_PASSWORD",
    "PREFECT_API_DATABASE_PASSWORD",
)
_HIDDEN: Final = "…"  # stands in the place of a secret
# Shorter words are hidden in addresses only: they may be parts of ordinary words.
_MIN_LENGTH: Final = 6
_USER_AND_PASSWORD: Final = re.compile(r"(?<=://)[^\s/?#@'\"<>]*(?:@[^\s/?#@'\"<>]+)*@")
# The address in pydantic's message on a setting that it rejects:
# `[…, input_value='https://lab:12345@server', input_type=str]`. Pydantic cuts long values in the
# middle, where the "@" may be, so that `_USER_AND_PASSWORD` does not match. The value is hidden.
_REJECTED_ADDRESS: Final = re.compile(r"(?<=input_value=)['\"][^\n]*?://[^\n]*?(?=, input_type=)")
_secrets: set[str] = set()


def hide(secret: str | None) -> None:
    """Remember a word that no text of this process may show.

    Args:
        secret: The word. None, and words of less than six letters, are ignored.
    """
    if secret is not None and len(secret) >= _MIN_LENGTH:
        _secrets.add(secret)


def hide_credentials(credentials: str) -> None:
    """Remember a user name and password, `user:password`, in the forms in which programs show them.

    Args:
        credentials: As they stand in an address or in `PREFECT_API_AUTH_STRING`.
    """
    decoded = unquote(credentials)
    for form in (credentials, decoded):
        hide(form)
        hide(form.partition(":")[2])
    hide(base64.b64encode(decoded.encode()).decode())  # in the header of a request


def hide_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Remember the passwords and keys in the variables of the environment.

    Args:
        environment: The variables by name, those of this process unless given.
    """
    hide(environment.get(EMAIL_VARIABLE))
    for name, value in environment.items():
        if name in _SECRET_VARIABLES:
            hide_credentials(value)
        for match in _USER_AND_PASSWORD.finditer(value):
            hide_credentials(match[0].removesuffix("@"))


def redact(text: str) -> str:
    """Return a text without the words that are hidden, and without passwords in addresses.

    >>> redact("no answer from https://lab:12345@server/api")
    'no answer from https://…@server/api'
    """
    if "://" in text:
        text = _REJECTED_ADDRESS.sub(_HIDDEN, text)
        text = _USER_AND_PASSWORD.sub(f"{_HIDDEN}@", text)
    # Both `lab:12345` and `12345` may be remembered. The longer one is replaced first. Otherwise
    # the user name would be left: `lab:…`.
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return text


class RedactedStream:
    """A text stream that writes everything through `redact`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text without its secrets, and return the number of letters of the whole text."""
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write lines without their secrets."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """Return whatever else the stream has, such as `flush` and `isatty`."""
        return getattr(self._stream, name)


class _RedactingFactory:
    """Makes log records without secrets, in their messages and in their tracebacks.

    Args:
        make_record: The factory that was in use before.
    """

    def __init__(self, make_record: Callable[..., logging.LogRecord]) -> None:
        self._make_record = make_record
        self._formatter = logging.Formatter()

    def __call__(self, *args: Any, **fields: Any) -> logging.LogRecord:
        """Return a record, as `logging.setLogRecordFactory` describes it."""
        record = self._make_record(*args, **fields)
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # the arguments do not fit; logging reports that itself
            return record
        shown_message = redact(message)
        if shown_message != message:
            record.msg = shown_message
            record.args = ()
        if record.exc_info:
            error_text = self._formatter.formatException(record.exc_info)
            shown_text = redact(error_text)
            if shown_text != error_text:
                record.exc_text = shown_text  # formatters write this text if there is one
        return record


def redact_error(error: BaseException) -> None:
    """Remove secrets from the texts of an error, and of the errors that led to it.

    Other programs write these texts where we have no say, such as the state of a run at a server.
    """
    cause: BaseException | None = error
    while cause is not None:
        cause.args = tuple(redact(part) if isinstance(part, str) else part for part in cause.args)
        cause = cause.__cause__ or cause.__context__


@contextmanager
def secrets_hidden(*, streams: bool = False, for_good: bool = False) -> Iterator[None]:
    """Keep secrets out of log lines, and of what is written to the terminal, in the body.

    The secrets are those of the environment, and those that `hide` gets.

    Args:
        streams: Also replace standard output and standard error by streams that redact.
        for_good: Leave all this as it is after the body, because the process ends then. What other
            programs' threads still write is redacted, too.
    """
    hide_environment()
    previous_factory = logging.getLogRecordFactory()
    previous_streams = (sys.stdout, sys.stderr)
    if not isinstance(previous_factory, _RedactingFactory):
        logging.setLogRecordFactory(_RedactingFactory(previous_factory))
    if streams:
        sys.stdout, sys.stderr = map(_redacted, previous_streams)
    try:
        yield
    finally:
        if not for_good:
            logging.setLogRecordFactory(previous_factory)
            sys.stdout, sys.stderr = previous_streams


def _redacted(stream: TextIO) -> TextIO:
    """Return a stream that redacts. A closed stream is None, and stays so."""
    if stream is None or isinstance(stream, RedactedStream):
        return stream
    return cast(TextIO, RedactedStream(stream))
