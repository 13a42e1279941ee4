"""Passwords, keys and a person's mail address are in no text that this process shows."""

from __future__ import annotations

import base64
import io
import logging
import sys

import pytest

from virnuc_core import confidential
from virnuc_core.confidential import (
    hide,
    hide_environment,
    redact,
    redact_error,
    secrets_hidden,
)
from virnuc_core.errors import VirnucError
from virnuc_core.reads import contact
from virnuc_core.reads.contact import contact_address, keep_contact_address

PASSWORD = "Zx9-swordfish"
ADDRESS = f"https://lab-user:{PASSWORD}@prefect.example:4200/api"
MAIL = "ada.distinctive@lab.example"


@pytest.fixture(autouse=True)
def _own_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test begin with a process that knows no secrets."""
    monkeypatch.setattr(confidential, "_secrets", set())
    monkeypatch.setattr(contact, "_addresses", [])
    for name in (*confidential._SECRET_VARIABLES, "PREFECT_API_URL", confidential.EMAIL_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"no answer from {ADDRESS}", "no answer from https://…@prefect.example:4200/api"),
        ("http://token@host/x and ftp://a:b@c", "http://…@host/x and ftp://…@c"),
        ("http://u:p@ss@host/x", "http://…@host/x"),
        ("https://host/a@b?c=d@e", "https://host/a@b?c=d@e"),
        ("reads@lane1.fastq: 3 reads", "reads@lane1.fastq: 3 reads"),
    ],
)
def test_addresses_are_shown_without_user_and_password(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_secrets_of_the_environment_are_hidden_in_all_their_forms() -> None:
    encoded = base64.b64encode(f"lab-user:{PASSWORD}".encode()).decode()
    hide_environment({"PREFECT_API_URL": ADDRESS, "PREFECT_API_KEY": "pnu_0123456789"})
    text = f"Authorization: Basic {encoded}, key pnu_0123456789, {PASSWORD}"
    assert redact(text) == "Authorization: Basic …, key …, …"


def test_a_password_is_hidden_with_its_escape_sequences_and_without() -> None:
    hide_environment({"PREFECT_API_URL": "http://u:s%40lty-word@host/api"})
    assert redact("s%40lty-word s@lty-word") == "… …"


def test_short_words_are_not_removed_from_ordinary_words() -> None:
    hide_environment({"PREFECT_API_AUTH_STRING": "admin:pass"})
    assert redact("admin:pass: 7 criteria passed") == "…: 7 criteria passed"


def test_our_errors_never_name_a_secret() -> None:
    hide(PASSWORD)
    assert (
        str(VirnucError(f"{ADDRESS} wants {PASSWORD}"))
        == "https://…@prefect.example:4200/api wants …"
    )


def test_errors_of_other_programs_lose_their_secrets_with_their_causes() -> None:
    cause = ValueError(f"for url {ADDRESS}", 7)
    error = RuntimeError(f"Failed to reach {ADDRESS}")
    error.__cause__ = cause
    redact_error(error)
    assert PASSWORD not in str(error)
    assert PASSWORD not in str(cause)
    assert cause.args[1] == 7


def test_log_lines_and_tracebacks_of_any_program_have_no_secrets() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("httpx")
    logger.addHandler(handler)
    factory = logging.getLogRecordFactory()
    try:
        with secrets_hidden():
            logger.warning("HTTP Request: GET %s", ADDRESS)
            logger.warning("100 %s of %d", "%", 7)
            try:
                raise RuntimeError(f"for url {ADDRESS}")
            except RuntimeError:
                logger.exception("failed")
    finally:
        logger.removeHandler(handler)
    lines = stream.getvalue()
    assert PASSWORD not in lines
    assert "HTTP Request: GET https://…@prefect.example:4200/api" in lines
    assert "100 % of 7" in lines
    assert "RuntimeError: for url https://…@prefect.example:4200/api" in lines
    assert logging.getLogRecordFactory() is factory, "afterwards logging is as it was"


def test_what_is_written_to_the_terminal_has_no_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", f"lab-user:{PASSWORD}")
    streams = (sys.stdout, sys.stderr)
    with secrets_hidden(streams=True):
        print(f"In the UI: {ADDRESS}")
        print(PASSWORD, file=sys.stderr)
        sys.stderr.writelines([f"{PASSWORD}\n"])
    assert (sys.stdout, sys.stderr) == streams
    captured = capsys.readouterr()
    assert captured.out == "In the UI: https://…@prefect.example:4200/api\n"
    assert captured.err == "…\n…\n"


def test_the_mail_address_is_the_given_one_or_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert contact_address() is None
    monkeypatch.setenv("VIRNUC_EMAIL", MAIL)
    assert contact_address() == MAIL
    keep_contact_address("")
    assert contact_address() == MAIL
    keep_contact_address("other@lab.example")
    assert contact_address() == "other@lab.example"
    assert redact(f"{MAIL} other@lab.example") == "… …"
