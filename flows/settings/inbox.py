"""What `predict-inbox` takes."""

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from virnuc.flows.settings.shared import FlowSettings
from virnuc_core.config import VerdictSpec

if TYPE_CHECKING:
    from virnuc_core.inbox import Ledger


class InboxSettings(VerdictSpec, FlowSettings):
    """Predict each new file of a folder, once."""

    inbox: Path = Field(description="folder that is watched; files are told apart by their content")
    out: Path = Field(
        description="results: one run directory per content, and inbox.tsv with each file's fate"
    )
    interleaved: bool = Field(False, description="mates follow each other in every file")
    pairs: bool = Field(
        True,
        description="judge mates together: files that are mates by their names or flags (BAM)",
    )
    settle_s: float = Field(
        60.0, ge=0, description="a file changed within this many seconds may still be arriving"
    )
    completion: tuple[str, ...] = Field(
        (),
        description="files that mark a complete sub-folder ('*.done'); all wait for one of them",
    )
    retry_failed: bool = Field(False, description="predict again what failed before")

    def check_flow_files(self) -> None:
        """Refuse an inbox that is not a folder, and results that would lie inside the inbox.

        Raises:
            InputError: There is no such folder.
            ConfigError: The results would lie inside the inbox.
        """
        self.open_ledger()  # raises these errors

    def open_ledger(self) -> "Ledger":
        """Return the ledger of the inbox, which finds its files and keeps their fates.

        Raises:
            InputError: There is no such folder.
            ConfigError: The results would lie inside the inbox.
        """
        from virnuc_core.inbox import Ledger  # few commands need it

        join_mates = self.pairs and not self.interleaved
        return Ledger(self.inbox, self.out, join_mates=join_mates, completion=self.completion)
