"""Commands that start no flow: reads and weights to begin with, what finished runs say, what this machine has."""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter
from cyclopts.types import NonNegativeFloat
from cyclopts.validators import Number
from pydantic import Field
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from virnuc.flows.cli.options import ENVIRONMENT, Flag, Json, command
from virnuc_core.config import DEFAULT_MODEL_LENGTH, VerdictSpec
from virnuc_core.encoders.model_config import (
    DnabertSize,
    Esm2Size,
    Storage,
)
from virnuc_core.errors import ConfigError, InputError, WeightsError
from virnuc_core.profiles import load_profile, profile_names
from virnuc_core.reads.simulate import SimulateSpec
from virnuc_core.reads.simulate import simulate as write_simulated
from virnuc_core.rundir import RunDir, run_lock

DISAGREE: Final = 5
COSINES_HELP: Final = (
    "cosines too, of sequences that both runs embedded: an fp32 run of a part against one in fp16"
)
WIDTH_IN_FILES: Final = 160
Directory = Annotated[Path, Parameter(name="DIR", help="directory of the validation")]
ModelsOut = Annotated[Path, Parameter(help="models directory to write")]
ModelsDir = Annotated[Path, Parameter(env_var=ENVIRONMENT["models"], help="models directory")]
Out = Annotated[Path, Parameter(name=("--out", "-o"))]
Wanted = Annotated[int, Parameter(name=("--reads", "-n"))]
HeadFile = Annotated[Path, Parameter(help="VirNucPro's 300_model.pth or 500_model.pth")]
HeadLength = Annotated[
    int, Parameter(help="read length S of the head, when its name does not say it")
]
StoredAs = Annotated[Storage, Parameter(help="store the encoders in this type")]

models = App(name="models", help="Make, convert, fetch or check weights.")


def show(header: Iterable[str], rows: Iterable[Iterable[str]], title: str | None = None) -> None:
    """A table on standard output, without colours where those are not wanted."""
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else WIDTH_IN_FILES
    Console(markup=False, emoji=False, highlight=False, width=width).print(table)


class SimulateSettings(SimulateSpec):
    """Where simulated reads go."""

    out: Path = Field(description="reads: .fastq or .fasta, with .gz or without")
    force: Flag = Field(False, description="write over files that are there")


@command(SimulateSettings, "out")
def simulate(settings: SimulateSettings) -> None:
    """Write labelled synthetic reads, a table of what each is, and their genomes."""
    made = write_simulated(settings, settings.out, force=settings.force)
    genomes = settings.viral_genomes + settings.other_genomes
    print(
        f"{made.reads_file}: {settings.reads:,} reads, {made.viral_reads:,} viral, of {genomes} genomes"
    )
    print(f"{made.truth_file}: what each read is")


def sample(
    source: str | Path, /, *, reads: Wanted, out: Out, seed: int = 0, force: Flag = False
) -> None:
    """Draw reads so that their lengths are distributed as in the whole.

    Args:
        source: FASTA or FASTQ file or folder
        reads: how many
        out: file to write; .gz packs it
        seed: equal seeds draw equal reads
        force: write over a file that is there"""
    from virnuc_core.reads.subsets import sample as draw

    print("\n".join(draw(str(source), reads, out, seed, force=force).lines()))


@models.command(name="init-random")
def init_random(
    out: ModelsOut,
    /,
    *,
    esm2: Annotated[Esm2Size, Parameter(help="size of the ESM-2")] = "tiny",
    dnabert_s: Annotated[DnabertSize, Parameter(help="size of the DNABERT-S")] = "tiny",
    head: Annotated[
        int, Parameter(validator=Number(gte=3), help="model length S: 300, 500, …")
    ] = DEFAULT_MODEL_LENGTH,
    dtype: Annotated[Storage, Parameter(help="what the encoders are stored in")] = "fp32",
    seed: Annotated[int, Parameter(help="equal seeds give equal bytes")] = 0,
) -> None:
    """Write a models directory with random weights of any size, for trying things out."""
    from virnuc_core.encoders.convert import init_random as write

    write(out, esm2=esm2, dnabert_s=dnabert_s, model_length=head, seed=seed, dtype=dtype)
    print(f"{out}: random weights, ESM-2 {esm2}, DNABERT-S {dnabert_s}, head for length {head}")


@models.command
def convert(
    out: ModelsOut,
    /,
    *,
    esm2: Annotated[
        Path | None, Parameter(help="ESM-2: a folder in HF layout, or fair-esm's .pt")
    ] = None,
    dnabert_s: Annotated[Path | None, Parameter(help="DNABERT-S: a folder in HF layout")] = None,
    head: HeadFile | None = None,
    model_length: HeadLength | None = None,
    dtype: StoredAs | None = None,
    drop_extra: Annotated[
        bool, Parameter(help="leave out tensors that the encoders do not have")
    ] = False,
) -> None:
    """Turn public checkpoints on disk into a models directory."""
    from virnuc_core.encoders.convert import convert_encoder, convert_head
    from virnuc_core.encoders.registry import DNABERT_S, ESM2

    if not (esm2 or dnabert_s or head):
        raise ConfigError("nothing to convert; give --esm2, --dnabert-s or --head")
    for encoder, source in ((ESM2, esm2), (DNABERT_S, dnabert_s)):
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
    from virnuc_core.encoders.convert import fetch as download

    download(out, head, model_length=model_length, dtype=dtype)
    print(f"{out}: ESM-2 3B, DNABERT-S and {head.name}")


@models.command
def quantize(out: Path, reads: str | Path, /, *, device: str = "cuda:0") -> None:
    """Measure on some of your reads what --precision int8 must know of a models directory, and keep it there.

    Args:
        out: models directory
        reads: FASTA or FASTQ file or folder, like those to come
        device: where: cuda:0 or cpu"""
    from virnuc_core.encoders.backends import torch_device
    from virnuc_core.encoders.quantise import quantise

    path, rows = quantise(out, str(reads), torch_device(device))
    print(f"{path}: of {rows:,} frames of reads; --precision int8 can be used now")


@models.command(name="verify")
def verify_models(out: Path, /, *, device: str = "cpu") -> None:
    """Is a models directory complete, sound, and equal to VirNucPro where that can be told?

    Args:
        out: models directory
        device: where the anchors are computed: cpu or cuda:0"""
    from virnuc_core.encoders.backends import torch_device
    from virnuc_core.encoders.verify import verify as examine

    for check in (checks := examine(out, torch_device(device))):
        print(f"{check.verdict:<8} {check.name}: {check.detail}")
    if failed := [check.name for check in checks if check.verdict == "fail"]:
        raise WeightsError(f"{out}: {', '.join(failed)} did not pass")


@models.command
def heads(*, models: ModelsDir) -> None:
    """The heads of a models directory: each that was ever installed, and what its card says."""
    from virnuc_core.encoders.kept_heads import kept_heads

    rows = []
    for head in kept_heads(models):
        card, mark = head.shape.card, "installed" if head.installed else ""
        told = (
            (str(card.auroc), "-".join(map(str, card.lengths)), card.test[:8])
            if card
            else ("no card", "", "")
        )
        rows.append(
            (str(head.number or ""), head.digest[:8], mark, str(head.shape.model_length), *told)
        )
    show(
        ("number", "digest", "", "model length", "AUROC of reads", "bases in training", "test"),
        rows,
    )


@models.command(name="use-head")
def use_head(number: str, /, *, models: ModelsDir) -> None:
    """Go back to a head that was installed before; the present one is kept."""
    from virnuc_core.encoders.kept_heads import use_head as put

    if not number.isdecimal():
        raise ConfigError(f"{number!r} is no number of a head; see virnuc models heads")
    print(f"{models / 'head'} is now {put(models, int(number)).name}")


def compare(
    vanilla: Annotated[Path, Parameter(help="the reference, A")],
    refactored: Annotated[Path, Parameter(help="what is held against it, B")],
    *,
    mode: Annotated[
        Literal["both", "frame", "consensus"], Parameter(help="what is compared")
    ] = "both",
    tolerance: Annotated[
        NonNegativeFloat, Parameter(help="score difference that counts as equal")
    ] = 0.01,
    minimum: Annotated[
        float, Parameter(validator=Number(gte=0, lte=1), help="agreement that is enough, 0 to 1")
    ] = 0.99,
    subset: Annotated[
        Flag, Parameter(help="A covers a part of B's reads: compare those only")
    ] = False,
    embeddings: Annotated[Flag, Parameter(help=COSINES_HELP)] = False,
    as_json: Json = False,
) -> int:
    """Agreement of two results: run directories, folders with VirNucPro's two files, or one file each."""
    from virnuc_core.report.agreement import meets
    from virnuc_core.report.compare import compare as hold
    from virnuc_core.report.text import cell
    from virnuc_core.report.views.correctness import correctness_section

    found = hold(
        vanilla,
        refactored,
        tolerance=tolerance,
        mode=mode,
        subset_of_a=subset,
        embeddings=embeddings,
    )
    lines = []
    if as_json:
        lines.append(found.model_dump_json(indent=2))
    else:
        section = correctness_section((found,))
        lines += section.sentences
        for row in section.rows:
            lines.append("")
            for name, value in row.items():
                if value is not None:
                    lines.append(f"{name + ':':<20}{cell(value)}")
    print("\n".join(lines))
    return 0 if meets(found, minimum) else DISAGREE


def report(out: Directory, /, *, profile: str | None = None, serve: Flag = False) -> None:
    """Render a validation's report again from its report.json, and print it.

    Args:
        profile: judge the raw files anew by this profile, instead of rendering what was judged before
        serve: show report.html to a browser on this machine until Ctrl-C"""
    from virnuc_core.report.build import rerender, write_report
    from virnuc_core.report.raw_files import run_names

    if profile is None:
        rerender(out)
    elif not run_names(out):
        raise InputError(
            "holds no runs of a validation",
            file=out,
            hint="name the directory that one was written to",
        )
    else:
        write_report(out, load_profile(profile))
    print((RunDir(out).report / "report.txt").read_text(encoding="utf-8"), end="")
    if serve:
        from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

        handler = partial(SimpleHTTPRequestHandler, directory=str(RunDir(out).report))
        with (
            ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
            suppress(KeyboardInterrupt),
        ):  # for this machine
            print(f"http://127.0.0.1:{server.server_port}/report.html (Ctrl-C ends it)", flush=True)
            server.serve_forever()


def verify(out: Directory, /, *, profile: str | None = None) -> int:
    """Recompute every number of a report from raw files, and name what differs; 1 when any does.

    Args:
        profile: what virnuc report judged by, where that was a file of your own"""
    from virnuc_core.report.verify import verify_report

    with Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("Computing again", total=1.0)
        found = verify_report(out, profile, lambda share: bar.update(task, completed=share))
    summed = (
        f"{len(found.differences):,} of {found.figures:,} figures are not what the raw files give"
    )
    if found.ok:
        summed = f"{found.figures:,} figures computed again, all as reported"
    print("\n".join([*found.differences, *found.remarks, summed]))
    return 0 if found.ok else 1


class RescoreSettings(VerdictSpec):
    """Which run is scored again, and how."""

    run: Path = Field(description="run directory")
    out: Path = Field(description="directory of the new results")
    head: Path | None = Field(
        None, description="the new head: its folder, or a models directory it is in"
    )
    write_viral: Annotated[bool, Parameter(parse=False)] = (
        False  # the reads themselves are not at hand
    )
    write_nonviral: Annotated[bool, Parameter(parse=False)] = False


@command(RescoreSettings, "run")
def rescore(settings: RescoreSettings) -> None:
    """Score a finished run's embeddings again: another head or threshold, no GPU."""
    from virnuc_core.tools.rescore import rescore as score

    with run_lock(settings.out):
        fates = score(
            RunDir(settings.run), settings.head, RunDir(settings.out), settings
        ).results.fates
    print(f"{fates['viral']:,} of {sum(fates.values()):,} reads are viral\nResults: {settings.out}")


def export(run: Path, /, *, out: Out | None = None, sample: str = "", force: Flag = False) -> None:
    """Write what other tools read of a finished run: MultiQC's custom content, Kraken's tables, verdicts on contigs.

    Args:
        run: run directory
        out: where to (default: RUN/export)
        sample: its name in MultiQC (default: the run's)
        force: write over files that are in OUT; those in RUN/export are the run's own"""
    from virnuc_core.report.exports import export as write
    from virnuc_core.runfiles import read_record

    name = sample or str(read_record(RunDir(run)).spec.get("sample") or run.resolve().name)
    print(*write(RunDir(run), out or run / "export", name, force=force or out is None), sep="\n")


def history(file: Path, /, *, profile: str | None = None) -> int:
    """Past validations, oldest first, as kept in a history file; exit code 5 when the newest is a regression.

    Args:
        file: virnuc-history.jsonl, beside a validation's directory
        profile: only runs of this profile"""
    from virnuc_core.report.regression import read_history, regression, trend
    from virnuc_core.report.text import cell

    kept = sorted(
        (e for e in read_history(file) if profile in (None, e.profile)), key=lambda e: e.created
    )
    if not kept:
        problem = "no run of that kind is in it" if file.is_file() else "no such file"
        raise InputError(problem, file=file, hint="a validation writes it beside its directory")
    rows = trend(kept)
    show(next(iter(rows), ()), (map(cell, row.values()) for row in rows))
    return DISAGREE if regression(kept, kept[-1]).verdict == "fail" else 0


def devices() -> None:
    """The devices of this machine, as --devices wants them."""
    from virnuc_core.engine.devices import cpu_name, visible_gpus

    gpus = visible_gpus()
    cores = len(os.sched_getaffinity(0))
    rows = [(f"cuda:{number}", gpu.name, gpu.id) for number, gpu in enumerate(gpus)]
    show(
        ("--devices", "name", "id"),
        [*rows, (f"cpu:{cores}", cpu_name(), f"{cores} cores this process may use")],
    )
    if not gpus:
        print("No NVIDIA driver or GPU is visible; virnuc computes on CPU cores.")


def profiles(name: str | None = None, /) -> None:
    """The profiles of `virnuc validate`. A .toml file of your own works as well.

    Args:
        name: show the thresholds of this profile, or of this .toml file"""
    if name is not None:
        profile = load_profile(name)
        rows = [
            (name.replace("_", " "), f"{target.op} {target.value:g}")
            for name, target in profile.targets.items()
        ]
        bands = (
            profile.scaling_bands
            if "scaling" not in profile.targets
            else profile.scaling_bands | {"2": None}
        )
        rows += [
            (f"scaling on {count} devices", f">= {band[0]:g}")
            for count, band in bands.items()
            if band
        ]
        show(("criterion", "threshold"), rows, f"{profile.name}: {profile.title}")
        return
    known = [
        (one.name, one.title, f"≥ {one.min_reads:,}", ", ".join(one.device_names) or "any device")
        for one in map(load_profile, profile_names())
    ]
    show(("profile", "what it asks", "reads", "meant for"), known)
