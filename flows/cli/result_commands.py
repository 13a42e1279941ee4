"""Commands on results: `virnuc compare`, `virnuc rescore` and `virnuc export`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat
from cyclopts.validators import Number
from pydantic import Field

from virnuc.flows.cli.answer_text import answer_lines, warning_lines
from virnuc.flows.cli.options import Flag, Json, Out, command
from virnuc.flows.cli.output import say
from virnuc_core.config import VerdictSpec
from virnuc_core.errors import ConfigError
from virnuc_core.rundir import RunDir, run_lock

if TYPE_CHECKING:
    from virnuc_core.validation import Comparison

DISAGREE: Final = 5  # exit code
COSINES_HELP: Final = (
    "cosines too, of sequences that both runs embedded: an fp32 run of a part against one in fp16"
)
LABEL_WIDTH: Final = 20


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
    """Compare two results: run directories, folders with VirNucPro's two files, or a file each."""
    from virnuc_core.report.agreement import meets
    from virnuc_core.report.compare import compare as compare_results

    comparison = compare_results(
        vanilla,
        refactored,
        tolerance=tolerance,
        mode=mode,
        subset_of_a=subset,
        embeddings=embeddings,
    )
    if as_json:
        # `dumps` escapes letters beyond ASCII, so that this is valid JSON in every encoding of the
        # output.
        print(json.dumps(comparison.model_dump(mode="json") | _source_names(comparison), indent=2))
    else:
        print("\n".join(_comparison_lines(comparison)))
    hint = _subset_hint(comparison)
    if hint:
        sys.stderr.write(f"{hint}\n")
    return 0 if meets(comparison, minimum) else DISAGREE


def _source_names(comparison: "Comparison") -> dict[str, object]:
    """Return what `compare_predictions` of VirNucPro's plans returns, with its names.

    It is about the frames or, if none were compared, about the chunks. A match of the scores is
    None if a side has no scores.
    """
    part = comparison.frames or comparison.consensus
    if part is None:  # never: a comparison without any part is an error
        return {}
    has_same_ids = not part.only_in_a and not part.only_in_b
    predictions_match = part.agreeing == part.in_both
    names: dict[str, object] = {
        "predictions_match": predictions_match,
        "score1_match": None,
        "score2_match": None,
        "max_diff_score1": None,
        "max_diff_score2": None,
        "num_sequences": part.total,
    }
    if part.score is not None:
        names |= part.score.model_dump(include=set(names))
    is_match = has_same_ids and predictions_match
    if part.score is not None:
        is_match = is_match and part.score.allclose
    reason = "" if has_same_ids else "Sequence IDs differ"
    return {"match": is_match, "reason": reason, **names}


def _subset_hint(comparison: "Comparison") -> str:
    """Return advice for a side A that has a part of the ids of B; empty for any other comparison.

    Files without a record do not tell that they cover a part of the reads.
    """
    part = comparison.frames or comparison.consensus
    is_part = part is not None and part.in_both and part.only_in_b and not part.only_in_a
    if comparison.subset_reads is not None or part is None or not is_part:
        return ""
    return (
        f"A has {part.in_both:,} of the {part.total:,} ids of B; if it covers a part of the reads, "
        "compare that part with --subset"
    )


def _comparison_lines(comparison: "Comparison") -> list[str]:
    """Return the lines that show a comparison, one per figure, with the words of the report.

    First come the sentences of the report's section, then a block of lines for each of its rows.
    """
    from virnuc_core.report.text import cell
    from virnuc_core.report.views.correctness import correctness_section

    section = correctness_section((comparison,))
    lines = list(section.sentences)
    for row in section.rows:
        lines.append("")
        for name, value in row.items():
            if value is not None:
                label = f"{name}:"
                lines.append(f"{label:<{LABEL_WIDTH}}{cell(value)}")
    return lines


class RescoreSettings(VerdictSpec):
    """Which run is scored again, and how."""

    run: Path = Field(description="run directory")
    out: Path = Field(description="directory of the new results")
    head: Path | None = Field(
        None, description="the new head: its folder, or a models directory it is in"
    )
    # no options: the reads themselves are not at hand
    write_viral: Annotated[bool, Parameter(parse=False)] = False
    write_nonviral: Annotated[bool, Parameter(parse=False)] = False


@command(RescoreSettings, "run")
def rescore(settings: RescoreSettings) -> None:
    """Score a finished run's embeddings again: another head or threshold, no GPU."""
    from virnuc_core.report.summary_page import write_rescore_pages
    from virnuc_core.tools.rescore import rescore as score_again

    run = RunDir(settings.run)
    new_run = RunDir(settings.out)
    with run_lock(settings.out):
        summary = score_again(run, settings.head, new_run, settings)
        page = write_rescore_pages(new_run, run, summary, settings.head, sys.argv)
    say(*answer_lines(summary.answer))
    say("", f"Results: {settings.out}", f"Page: {page}")
    say(*warning_lines(summary.answer))


def export(
    run: Path,
    /,
    *,
    out: Out | None = None,
    sample: str = "",
    framed_only: Flag = False,
    force: Flag = False,
) -> None:
    """Write finished results for other tools: MultiQC, readers of Kraken's tables, and contigs.

    Of a folder with several samples, one page and one set for MultiQC are over all of them.

    Args:
        run: run directory, or the folder of a prediction of several samples
        out: where to (default: RUN/export)
        sample: its name in all files (default: the run's)
        framed_only: contigs.tsv: weigh chunks as if those without an open frame did not exist
        force: write over files that are in OUT; those in RUN/export are the run's own
    """
    from virnuc_core.report.exports import OWN_FOLDER
    from virnuc_core.report.exports import export as write_exports
    from virnuc_core.report.sample_exports import export_samples, is_folder_of_samples
    from virnuc_core.runfiles import read_record

    # All files in our own folder are ours, so they may be replaced without `--force`.
    may_replace = force or out is None
    target = run / OWN_FOLDER if out is None else out
    if is_folder_of_samples(run):
        if sample:
            raise ConfigError(f"{run}: holds several samples; --sample names the sample of one run")
        paths = export_samples(run, target, force=may_replace, framed_only=framed_only)
    else:
        run_dir = RunDir(run)
        sample_name = sample
        if not sample_name:
            recorded_name = read_record(run_dir).spec.get("sample")
            sample_name = str(recorded_name or run.resolve().name)
        paths = write_exports(
            run_dir, target, sample_name, force=may_replace, framed_only=framed_only
        )
    for path in paths:
        print(path)
