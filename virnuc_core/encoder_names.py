"""The names of the encoders: the only place with the words for them.

Types, file formats, messages and reports take the name of an encoder from here. So these names
follow when an encoder is replaced (docs/encoders.md says how). Everything else that virnuc knows
about an encoder is in `encoders.registry`. This module imports nothing, so that every other module
can use it.
"""

from dataclasses import dataclass
from typing import Final, Literal

# Mypy needs the names as types. The order is the order of the columns of the joined embeddings.
EncoderName = Literal["dnabert_s", "esm2"]
EncoderTitle = Literal["DNABERT-S", "ESM-2"]
Molecule = Literal["dna", "protein"]


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """What an encoder is called in the different places.

    Attributes:
        name: Folder in a models directory, value of the column `encoder` in telemetry, key in JSON
            records, and option of `virnuc models` (with - in place of _).
        title: Name in reports and messages, and name of the encoder's stage on the run's clock.
        public_title: Title of the public model that VirNucPro uses.
        checkpoint: What a public checkpoint of the encoder is, for help texts.
        molecule: Which of the two sequences of an open reading frame the encoder embeds.
        seconds_column: Column of the telemetry's table of shards, and field of the report, with
            the seconds of device time that the encoder took.
        scaling_field: Field of the report with the encoder's speed-up on several devices.
        citation: The paper of the public model.
    """

    name: EncoderName
    title: EncoderTitle
    public_title: str
    checkpoint: str
    molecule: Molecule
    seconds_column: str
    scaling_field: str
    citation: str

    @property
    def option(self) -> str:
        """Return the option of `virnuc models` that stands for the encoder."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def tokens_column(self) -> str:
        """Return the column of the telemetry's table of shards that counts the encoder's tokens."""
        return f"{self.molecule}_tokens"

    @property
    def flops_field(self) -> str:
        """Return the field of a run's summary with the operations for one token of the encoder."""
        return f"{self.name}_per_token"

    @property
    def ceiling_field(self) -> str:
        """Return the field of a run's summary with the measured limits of the encoder's speed.

        The limit is the tokens/s of its linear layers alone, by device.
        """
        return f"{self.name}_ceiling_tokens_s"

    @property
    def percent_field(self) -> str:
        """Return the field of the report with a device's utilisation while the encoder ran."""
        return f"{self.name}_percent"

    @property
    def samples_field(self) -> str:
        """Return the field of the report with the number of utilisation samples of that time."""
        return f"{self.name}_samples"


DNA: Final = EncoderNames(
    name="dnabert_s",
    title="DNABERT-S",
    public_title="DNABERT-S",
    checkpoint="a folder in HF layout",
    molecule="dna",
    seconds_column="dnabert_s",  # the files of all versions have this name, which has no "_s" added
    scaling_field="dnabert_scaling",
    citation="Zhou et al. 2024, doi 10.48550/arXiv.2402.08777",
)
PROTEIN: Final = EncoderNames(
    name="esm2",
    title="ESM-2",
    public_title="ESM-2 3B",
    checkpoint="a folder in HF layout, or fair-esm's .pt",
    molecule="protein",
    seconds_column="esm2_s",
    scaling_field="esm2_scaling",
    citation="Lin et al., Science 2023, doi 10.1126/science.ade2574",
)
NAMES: Final = (DNA, PROTEIN)
ENCODER_NAMES: Final[tuple[EncoderName, ...]] = (DNA.name, PROTEIN.name)
RANDOM_ORIGIN: Final = "random"  # the origin of random weights begins with this word
# The folders of a models directory, for help texts
MODEL_FOLDERS: Final = f"{PROTEIN.name}/, {DNA.name}/, head/"
