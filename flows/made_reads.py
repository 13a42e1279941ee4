"""Draws or simulates the reads of a flow, if its settings ask for it."""

from typing import TypeVar

from virnuc.flows.settings.measured import MeasureSettings
from virnuc.tasks.drawing import draw_subset, simulate_reads
from virnuc_core.config import INPUT_FIELDS, ReadsSpec
from virnuc_core.reads.sources import sample_name
from virnuc_core.rundir import RunDir

MeasuredSettings = TypeVar("MeasuredSettings", bound=MeasureSettings)


def with_made_reads(settings: MeasuredSettings) -> MeasuredSettings:
    """Draw or simulate the reads that the settings ask for, and return settings with these reads.

    The settings are returned unchanged if they ask for neither. The fields `subset` and `simulate`
    stay, for the record of the run.

    Raises:
        VirnucError: The reads cannot be used, or the number is none.
    """
    run = RunDir(settings.out)
    if settings.simulate is not None:
        made = simulate_reads(
            run,
            settings.simulate,
            seed=settings.reads_seed,
            pairs=settings.simulate_pairs,
            force=settings.force,
        ).result()
    elif settings.subset is not None:
        source = ReadsSpec(**settings.model_dump(include={*ReadsSpec.model_fields}))
        made = draw_subset(
            run,
            source,
            settings.subset,
            seed=settings.reads_seed,
            label=sample_name(source.all_inputs),
            force=settings.force,
        ).result()
    else:
        return settings
    # The drawn reads are FASTA or FASTQ, which have no read groups.
    drawn_fields = made.reads.model_dump(include={*INPUT_FIELDS, "interleaved", "read_group"})
    return settings.model_copy(update=drawn_fields)
