"""The command `virnuc predict`."""

from pydantic import Field

from virnuc.flows.cli.flow_command import FlowCommand, flow_command
from virnuc.flows.cli.options import Flag
from virnuc.flows.settings.predict import PredictSettings


class PredictOptions(PredictSettings):
    """The settings of a prediction, and what only its command takes."""

    no_prefect: Flag = Field(
        False, description="the same steps without a Prefect server; nothing is recorded there"
    )


predict = flow_command(
    FlowCommand(
        flow="virnuc.flows.predict:predict",
        settings=PredictOptions,
        facts=lambda settings: {"Results": str(settings.out)},
        positional=("reads",),
    )
)
