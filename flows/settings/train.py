"""What `train` takes."""

from pathlib import Path

from pydantic import Field

from virnuc.flows.settings.shared import RunSettings
from virnuc_core.config import TrainSpec
from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.errors import ConfigError


class TrainSettings(TrainSpec, RunSettings):
    """Fit the head on labelled reads."""

    pairs: bool = Field(
        True,
        description="take mates together, as reads of one genome; of a folder, files that are "
        "mates by their names",
    )
    out: Path = Field(
        description="run directory of the training embeddings; the head is written to OUT/head"
    )
    models: Path = Field(
        description=f"models directory: {PROTEIN.name}/ and {DNA.name}/; "
        "it needs no head/ with --model-length"
    )
    model_length: int | None = Field(
        None, ge=3, le=1 << 20, description="bases of a chunk; default: the old head's"
    )
    install: bool = Field(
        False, description="put a head better than chance, and than the old one, into the models"
    )
    install_anyway: bool = Field(
        False, description="put the head into the models directory, however good it is"
    )

    def inputs(self) -> tuple[str, ...]:
        """Return the files of local reads, and those about the genomes that the reads are from.

        Raises:
            InputError: A file of reads does not exist.
        """
        tables = (self.truth, self.groups, self.genomes, self.coding_only)
        return (*super().inputs(), *(str(path) for path in tables if path))

    def check_flow_files(self) -> None:
        """Refuse a table of origins (`truth`) that cannot be used.

        Raises:
            InputError: The table of origins cannot be read.
            ConfigError: An annotation is given without the genomes.
        """
        from virnuc_core.training.truth import read_truth  # it brings scikit-learn along

        read_truth(self.truth)
        if self.coding_only is not None and self.genomes is None:
            raise ConfigError(
                "coding_only: the annotation needs the sequences it is of; give --genomes"
            )
