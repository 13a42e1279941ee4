"""What `predict` takes."""

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from virnuc.flows.parameters import within_roots
from virnuc.flows.settings.shared import RunSettings
from virnuc_core import config
from virnuc_core.config import (
    ClusterSpec,
    VerdictSpec,
)
from virnuc_core.errors import ConfigError
from virnuc_core.rundir import SAMPLES, RunDir


class PredictSettings(VerdictSpec, ClusterSpec, RunSettings):
    """Which reads are viral."""

    samples: Path | None = Field(
        None,
        description="sample sheet (columns sample, fastq_1, fastq_2): a run for each sample, in OUT/sample",
    )
    sample_from: Literal["none", "name", "read-group"] = Field(
        "none",
        description="each file, or pair, is a sample by its name, or each SM, else ID, of a BAM: runs OUT/sample",
    )

    @property
    def many(self) -> bool:
        """Whether these are samples, each with a run of its own."""
        return self.samples is not None or self.sample_from != "none"

    def check_own_files(self) -> None:
        """Refuse samples that cannot be told apart, and a place for them that is a run's own."""
        other = (
            RunDir(self.out).record if self.many else self.out / SAMPLES
        )  # each would stop the other's resuming
        if other.exists():
            raise ConfigError(
                f"{self.out} holds {'a single run' if self.many else 'samples'}; choose another directory"
            )
        if self.many:
            self.by_sample()

    def by_sample(self) -> dict[str, Self]:
        """The settings of each sample's own run. Errors: those of `read_sheet` and `by_name`; `ConfigError`."""
        from virnuc_core.reads.samples import by_name, by_read_group, read_sheet  # few runs need it

        if self.samples is not None and (self.named or self.sample_from != "none"):
            raise ConfigError("samples: the sheet names all reads; give none beside it")
        if self.read_group:
            raise ConfigError("read_group: one is named; several samples have their own")
        told_by = {"name": by_name, "read-group": by_read_group}
        found = (
            told_by[self.sample_from](self) if self.samples is None else read_sheet(self.samples)
        )
        runs = {}
        for name, reads in found.items():
            own = {"samples": None, "sample_from": "none", "out": self.out / name}
            runs[name] = self.model_copy(
                update=reads.model_dump(include={*config.INPUT_FIELDS, "read_group"}) | own
            )
            within_roots(runs[name])
        return runs

    def is_done(self) -> bool:
        """Whether the directory holds a complete run, which is not to be made anew."""
        run = RunDir(self.out)
        if self.force or self.many or not os.access(run.summary, os.R_OK):
            return False
        from virnuc_core.pipeline import read_summary  # it brings the engine along

        summary = read_summary(run)
        return summary is not None and len(list(run.shards.glob("0*.h5"))) == summary.shards
