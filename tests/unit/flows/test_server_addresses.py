"""The password in the address of a Prefect server is not printed."""

from __future__ import annotations

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from virnuc.flows.cli import doctor_server
from virnuc_core.errors import ConfigError

ADDRESS = "http://alice:s3cret@127.0.0.1:9/api"  # nothing listens on port 9


def test_doctor_shows_no_password_if_the_server_does_not_answer() -> None:
    with (
        temporary_settings(updates={PREFECT_API_URL: ADDRESS}),
        pytest.raises(ConfigError, match=r"nothing answers at .*127\.0\.0\.1:9/api") as caught,
    ):
        list(doctor_server.check_prefect_server())
    assert "s3cret" not in str(caught.value)
    assert "alice" not in str(caught.value)


@pytest.mark.parametrize(("status", "body"), [(200, "0.0.1"), (401, "")])
def test_doctor_shows_no_password_if_the_server_answers(status: int, body: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, json=body))
    with httpx.Client(base_url=ADDRESS, transport=transport) as client:
        try:
            message = doctor_server._check_version(client, ADDRESS).detail
        except ConfigError as error:
            message = str(error)
    assert "127.0.0.1:9/api" in message
    assert "s3cret" not in message
