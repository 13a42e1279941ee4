"""What `predict` takes.

Most of its options are fields of the groups in `virnuc_core/config.py`. So a script can set them in
a `RunSpec`, and `virnuc inspect` has those about reads and samples, too.
"""

import os
from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field

from virnuc.flows.settings.shared import LiveSettings, RunSettings
from virnuc_core import config
from virnuc_core.allowed_paths import require_allowed_options
from virnuc_core.config import ClusterSpec, EngineSpec, SamplesSpec, VerdictSpec
from virnuc_core.errors import ConfigError
from virnuc_core.rundir import SAMPLES, RunDir
from virnuc_core.system_errors import path_exists


class PredictSettings(SamplesSpec, VerdictSpec, ClusterSpec, LiveSettings, RunSettings):
    """Which reads are viral."""

    form_descriptions: ClassVar[Mapping[str, str]] = {
        "reads": f"{RunSettings.form_descriptions['reads']} Leave it empty if you name a sample "
        "sheet in samples.",
        "samples": "Sample sheet, for several samples in one run: a table (.csv, .tsv) with the "
        "columns sample, fastq_1 and fastq_2, as the worker's machine sees it. Each sample gets a "
        "folder of its own in out. Leave reads empty then.",
    }

    disable_checkpointing: bool = Field(
        False,
        description="write no shards: a run that stops begins anew, and no embeddings are kept",
    )

    def engine(self) -> EngineSpec:
        """Return the settings of the engine, without commits if checkpoints are disabled."""
        engine = super().engine()
        if self.disable_checkpointing:
            engine = engine.model_copy(update={"commit": False})
        return engine

    def check_flow_files(self) -> None:
        """Refuse samples that cannot be told apart, and a directory with runs of the other kind.

        An output directory holds either a single run or a folder for each of several samples. Each
        kind has a file that the other one does not have.

        Raises:
            ConfigError: The directory, the samples or the file of live figures cannot be used.
        """
        self.check_metrics_file()
        if self.has_samples:
            file_of_other_kind = RunDir(self.out).record
            other_kind = "a single run"
        else:
            file_of_other_kind = self.out / SAMPLES
            other_kind = "samples"
        if path_exists(file_of_other_kind):
            raise ConfigError(f"{self.out} holds {other_kind}; choose another directory")
        if self.has_samples:
            from virnuc_core.reads.decision_log import unlogged_check
            from virnuc_core.reads.samples import check_sheet_files

            with unlogged_check():  # the run logs which files it joins, and which are not there
                self.by_sample()  # raises an error for samples that cannot be used
                if self.samples is not None:
                    check_sheet_files(self.samples)

    def by_sample(self) -> dict[str, Self]:
        """Return the settings of each sample's own run, by its name.

        Raises:
            ConfigError: Samples are named in two ways, or a path is not allowed.
            InputError: The sample sheet or the names of the files cannot be used.
        """
        from virnuc_core.reads.samples import reads_by_sample  # few runs need it

        runs = {}
        for name, reads in reads_by_sample(self).items():
            fields = reads.model_dump(include={*config.INPUT_FIELDS, "read_group"})
            # Each run is one of a single sample, in a folder with the sample's name.
            fields |= {"samples": None, "sample_from": "none", "out": self.out / name}
            if self.metrics_file is not None:
                # Each run has a file of live figures of its own.
                fields["metrics_file"] = self.metrics_file.with_stem(
                    f"{self.metrics_file.stem}-{name}"
                )
            run = self.model_copy(update=fields)
            require_allowed_options(run)
            runs[name] = run
        return runs

    def is_done(self) -> bool:
        """Return whether the output directory has a complete run of all planned shards.

        The files of the shards are only counted, and not read. The answer is no with `force`,
        because the run is computed again, and for several samples, because each has a directory of
        its own.
        """
        run = RunDir(self.out)
        if self.force or self.has_samples or not os.access(run.summary, os.R_OK):
            return False
        from virnuc_core.pipeline import read_summary  # it brings the engine along

        summary = read_summary(run)
        if summary is None:
            return False
        n_committed = len(list(run.shards.glob("0*.h5")))  # names of shards are padded with zeros
        return n_committed == summary.shards  # the number of shards of the finished run
