"""What `predict-inbox` takes."""

from pathlib import Path

from pydantic import Field

from virnuc.flows.settings.shared import FlowSettings
from virnuc_core.config import VerdictSpec


class InboxSettings(VerdictSpec, FlowSettings):
    """Predict each new file of a folder, once."""

    inbox: Path = Field(description="folder that is watched; files are told apart by their content")
    out: Path = Field(
        description="results: one run directory per content, and inbox.tsv with each file's fate"
    )
    interleaved: bool = Field(False, description="mates follow each other in every file")
    pairs: bool = Field(True, description="mates that follow each other in a BAM file are pairs")
    settle_s: float = Field(
        60.0, ge=0, description="a file changed within this many seconds may still be arriving"
    )
    retry_failed: bool = Field(False, description="predict again what failed before")

    def check_flow_files(self) -> None:
        """Refuse an inbox that is not a folder, and results that would lie inside the inbox.

        Raises:
            InputError: There is no such folder.
            ConfigError: The results would lie inside the inbox.
        """
        from virnuc_core.inbox import Ledger

        Ledger(self.inbox, self.out)  # raises these errors
