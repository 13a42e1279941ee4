"""The commands `virnuc models …`: make, convert, fetch and check weights, and choose a head."""

from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter
from cyclopts.validators import Number

from virnuc.flows.cli.options import ENVIRONMENT
from virnuc.flows.cli.output import show_table
from virnuc_core.answer import RANDOM_NOTE, weight_remarks
from virnuc_core.config import DEFAULT_MODEL_LENGTH
from virnuc_core.encoder_names import DNA, PROTEIN
from virnuc_core.encoders.model_config import (
    DnaSize,
    ProteinSize,
    Storage,
)
from virnuc_core.errors import ConfigError, WeightsError
from virnuc_core.first_use import first_use

MODELS_DESCRIPTION: Final = "the models"  # for a process that waits while another makes them
ModelsOut = Annotated[Path, Parameter(help="models directory to write")]
ModelsDir = Annotated[Path, Parameter(env_var=ENVIRONMENT["models"], help="models directory")]
HeadFile = Annotated[Path, Parameter(help="VirNucPro's 300_model.pth or 500_model.pth")]
HeadLength = Annotated[
    int, Parameter(help="read length S of the head, when its name does not say it")
]
StoredAs = Annotated[Storage, Parameter(help="store the encoders in this type")]

models = App(
    name="models",
    help="Make, convert, fetch or check weights.",
    help_epilogue="Example: virnuc models verify models",
)


@models.command(name="init-random")
def init_random(
    out: ModelsOut,
    /,
    *,
    protein_size: Annotated[
        ProteinSize, Parameter(name=PROTEIN.option, help=f"size of the {PROTEIN.title}")
    ] = "tiny",
    dna_size: Annotated[
        DnaSize, Parameter(name=DNA.option, help=f"size of the {DNA.title}")
    ] = "tiny",
    head: Annotated[
        int, Parameter(validator=Number(gte=3), help="model length S: 300, 500, …")
    ] = DEFAULT_MODEL_LENGTH,
    dtype: Annotated[Storage, Parameter(help="what the encoders are stored in")] = "fp32",
    seed: Annotated[int, Parameter(help="equal seeds give equal bytes")] = 0,
) -> None:
    """Write a models directory with random weights of any size, for trying things out."""
    from virnuc_core.encoders.convert import init_random as write_random_models

    # Another process that makes this directory at the same time waits until this one is done.
    with first_use(out, MODELS_DESCRIPTION):
        write_random_models(out, protein_size, dna_size, model_length=head, seed=seed, dtype=dtype)
    sizes = f"{PROTEIN.title} {protein_size}, {DNA.title} {dna_size}"
    print(f"{out}: random weights, {sizes}, head for length {head}")
    print(RANDOM_NOTE)


@models.command
def convert(
    out: ModelsOut,
    /,
    *,
    protein: Annotated[
        Path | None,
        Parameter(name=PROTEIN.option, help=f"{PROTEIN.title}: {PROTEIN.checkpoint}"),
    ] = None,
    dna: Annotated[
        Path | None, Parameter(name=DNA.option, help=f"{DNA.title}: {DNA.checkpoint}")
    ] = None,
    head: HeadFile | None = None,
    model_length: HeadLength | None = None,
    dtype: StoredAs | None = None,
    drop_extra: Annotated[
        bool, Parameter(help="leave out tensors that the encoders do not have")
    ] = False,
) -> None:
    """Turn public checkpoints on disk into a models directory."""
    from virnuc_core.encoders.convert import convert_encoder, convert_head
    from virnuc_core.encoders.registry import DNA_ENCODER, PROTEIN_ENCODER

    if not (protein or dna or head):
        raise ConfigError(f"nothing to convert; give {PROTEIN.option}, {DNA.option} or --head")
    # Another process that makes this directory at the same time waits until this one is done.
    with first_use(out, MODELS_DESCRIPTION):
        for encoder, source in ((PROTEIN_ENCODER, protein), (DNA_ENCODER, dna)):
            if source is not None:
                convert_encoder(encoder, source, out, dtype, drop_extra)
                print(out / encoder.name)
        if head is not None:
            convert_head(head, out, model_length)
            print(out / "head")


@models.command
def fetch(
    out: ModelsOut,
    /,
    *,
    head: HeadFile,
    model_length: HeadLength | None = None,
    dtype: StoredAs | None = None,
) -> None:
    """Download the public encoders at pinned revisions into a models directory."""
    from virnuc_core.encoders.convert import fetch as download_models

    # Jobs that start together and all fetch the models wait for the first, and then find them.
    # Another process that makes this directory at the same time waits until this one is done.
    with first_use(out, MODELS_DESCRIPTION):
        download_models(out, head, model_length=model_length, dtype=dtype)
    print(f"{out}: {PROTEIN.public_title}, {DNA.public_title} and {head.name}")


@models.command
def quantize(out: Path, reads: str | Path, /, *, device: str = "cuda:0") -> None:
    """Calibrate --precision int8 on some of your reads, and keep the result beside the models.

    Args:
        out: models directory
        reads: FASTA or FASTQ file or folder, like those to come
        device: where: cuda:0 or cpu
    """
    from virnuc_core.encoders.backends import torch_device
    from virnuc_core.encoders.quantise import quantise

    path, rows = quantise(out, str(reads), torch_device(device))
    print(f"{path}: of {rows:,} frames of reads; --precision int8 can be used now")


@models.command(name="verify")
def verify_models(out: Path, /, *, device: str = "cpu") -> None:
    """Check that a models directory is complete and sound, and gives VirNucPro's numbers.

    Args:
        out: models directory
        device: where the reference rows (anchors) are computed: cpu or cuda:0
    """
    from virnuc_core.encoders.backends import torch_device
    from virnuc_core.encoders.verify import verify

    failed_checks = []
    for check in verify(out, torch_device(device)):
        print(f"{check.verdict:<8} {check.name}: {check.detail}")
        if check.verdict == "fail":
            failed_checks.append(check.name)
    if failed_checks:
        raise WeightsError(f"{out}: {', '.join(failed_checks)} did not pass")


@models.command
def heads(*, models: ModelsDir) -> None:
    """List the heads that were ever installed in a models directory, and what their cards say."""
    from virnuc_core.encoders.kept_heads import kept_heads

    rows = []
    for head in kept_heads(models):
        number = ""  # a head that was never put into the archive has none
        if head.number:
            number = str(head.number)
        mark = "installed" if head.is_installed else ""
        auroc = "no card"
        lengths = ""
        test_set = ""
        card = head.shape.card
        if card is not None:
            auroc = str(card.auroc)
            # The shortest, the median and the longest read of the training.
            lengths = "-".join(str(length) for length in card.lengths)
            test_set = card.test[:8]  # the digest of the test set, shortened
        model_length = str(head.shape.model_length)
        rows.append((number, head.digest[:8], mark, model_length, auroc, lengths, test_set))
    header = (
        "number",
        "digest",
        "",
        "model length",
        "AUROC of reads",
        "bases in training",
        "test",
    )
    show_table(header, rows)
    _print_trust(models)


def _print_trust(models_dir: Path) -> None:
    """Print whether verdicts by the weights of a models directory mean anything."""
    from virnuc_core.encoders.checkpoint import weight_facts

    facts = weight_facts(models_dir)
    for remark in weight_remarks(facts.origins, facts.has_card):
        print(remark)


@models.command(name="use-head")
def use_head(number: str, /, *, models: ModelsDir) -> None:
    """Go back to a head that was installed before; the present one is kept."""
    from virnuc_core.encoders.kept_heads import use_head as install_head

    if not number.isdecimal():
        raise ConfigError(f"{number!r} is no number of a head; see virnuc models heads")
    head = install_head(models, int(number))
    print(f"{models / 'head'} is now {head.name}")
    _print_trust(models)
