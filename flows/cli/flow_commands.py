"""The commands of the flows other than `predict`: what each runs, and what it says at the end."""

from pathlib import Path

from virnuc.flows.cli.flow_command import FlowCommand, flow_command
from virnuc.flows.settings.inbox import InboxSettings
from virnuc.flows.settings.measured import MeasureSettings
from virnuc.flows.settings.overhead import OverheadSettings
from virnuc.flows.settings.profile import ProfileSettings
from virnuc.flows.settings.scale import ScaleSettings
from virnuc.flows.settings.train import TrainSettings
from virnuc.flows.settings.tune import TuneSettings
from virnuc.flows.settings.validate import ValidateSettings


def _report_page(settings: MeasureSettings) -> dict[str, str]:
    """Return where the report of a validation or a scaling curve lies."""
    return {"Report": f"{settings.newest}/report/report.html"}


def _report_text(settings: ValidateSettings) -> Path:
    """Return the file of the report that the terminal shows."""
    return settings.newest / "report" / "report.txt"


def _inbox_table(settings: InboxSettings) -> dict[str, str]:
    """Return where the fate of each file of an inbox is written."""
    return {"Fates": f"{settings.out}/inbox.tsv"}


def _tuned_settings(settings: TuneSettings) -> dict[str, str]:
    """Return the option that uses the settings found, and where the figures lie."""
    return {
        "Use it": f"--settings {settings.out}/settings.toml",
        "All figures": f"{settings.out}/tune.json",
    }


def _profile_tables(settings: ProfileSettings) -> dict[str, str]:
    """Return the page with all tables that say where the time went."""
    return {"Tables": f"{settings.out}/telemetry/traces/profile.md"}


def _trained_head(settings: TrainSettings) -> dict[str, str]:
    """Return where the head lies, and the page of its figures."""
    return {"Head": f"{settings.out}/head", "Figures": f"{settings.out}/train.html"}


def _overhead_figures(settings: OverheadSettings) -> dict[str, str]:
    """Return where the measured overheads are written."""
    return {"All figures": f"{settings.out}/checkpoint_overhead.json"}


validate = flow_command(
    FlowCommand(
        function="virnuc.flows.validate:validate",
        settings=ValidateSettings,
        facts=_report_page,
        text=_report_text,
        has_page=True,
        positional=("reads",),
    )
)

predict_inbox = flow_command(
    FlowCommand(
        function="virnuc.flows.inbox:predict_inbox",
        settings=InboxSettings,
        facts=_inbox_table,
    )
)

scale = flow_command(
    FlowCommand(
        function="virnuc.flows.scale:scale",
        settings=ScaleSettings,
        facts=_report_page,
        tables="virnuc.flows.cli.flow_tables:scaling_tables",
        positional=("reads",),
    )
)

tune = flow_command(
    FlowCommand(
        function="virnuc.flows.tune:tune",
        settings=TuneSettings,
        facts=_tuned_settings,
        tables="virnuc.flows.cli.flow_tables:sweep_tables",
        positional=("reads",),
    )
)

profile = flow_command(
    FlowCommand(
        function="virnuc.flows.profile:profile",
        settings=ProfileSettings,
        facts=_profile_tables,
        tables="virnuc.flows.cli.flow_tables:profile_tables",
        positional=("reads",),
    )
)

overhead = flow_command(
    FlowCommand(
        function="virnuc.flows.overhead:overhead",
        settings=OverheadSettings,
        facts=_overhead_figures,
        tables="virnuc.flows.cli.flow_tables:overhead_tables",
        positional=("out",),
    )
)

train = flow_command(
    FlowCommand(
        function="virnuc.flows.train:train",
        settings=TrainSettings,
        facts=_trained_head,
        positional=("reads",),
    )
)
