"""The command `virnuc predict`."""

from typing import Literal

from pydantic import Field

from virnuc.flows.cli.flow_command import FlowCommand, flow_command
from virnuc.flows.cli.options import Flag
from virnuc.flows.settings.predict import PredictSettings
from virnuc_core.config import Spec


class PredictOptions(Spec):
    """What only the command of a prediction takes."""

    no_prefect: Flag = Field(
        False, description="the same steps without a Prefect server; nothing is recorded there"
    )
    serve: Literal["auto", "off", "require"] = Field(
        "auto",
        description="workers of `virnuc serve`; auto: if it runs and fits; require: no others",
    )


def _result_places(settings: PredictSettings) -> dict[str, str]:
    """Return where the results and the page for people lie."""
    return {"Results": str(settings.out), "Page": str(settings.out / "summary.html")}


predict = flow_command(
    FlowCommand(
        function="virnuc.flows.predict:predict",
        settings=PredictSettings,
        options=PredictOptions,
        facts=_result_places,
        positional=("reads",),
    )
)
