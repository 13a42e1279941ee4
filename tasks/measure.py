"""The steps that measure, compare and judge runs; those that fit a head; and the reviewer's answer."""

import tomllib
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from prefect.client.schemas.objects import State
from prefect.input import RunInput
from pydantic import Field, create_model

from virnuc.tasks.server import device_slots
from virnuc.tasks.step import (
    Markdown,
    Rows,
    cell,
    done,
    emit,
    first_attempt,
    key,
    on_host,
    progress_artifact,
    publish_markdown,
    publish_table,
    step,
)
from virnuc_core.baseline.run import run_baseline
from virnuc_core.config import EngineSpec, TraceSpec, TrainSpec
from virnuc_core.engine.devices import resolve, resolve_engine
from virnuc_core.profiles import Answer, BaselineSpec, Profile, Review
from virnuc_core.reads.store import OrfStore
from virnuc_core.report.build import REGRESSION, RegressionFile, trend, write_report
from virnuc_core.report.charts import all_charts
from virnuc_core.report.compare import compare_runs, take_results
from virnuc_core.report.model import Report
from virnuc_core.report.render import (
    Mark,
    message,
    render_rows,
    render_sections,
    render_template,
    templates,
)
from virnuc_core.rundir import RUN_FILES, RunDir, discard, run_lock, write_text_atomically
from virnuc_core.runfiles import ModelFlops, read
from virnuc_core.tools.bench import Bench, measure_ceilings, measure_overhead, measure_precision
from virnuc_core.tools.trace import TraceTable
from virnuc_core.tools.trace import trace as record
from virnuc_core.tools.tune import Candidate, Sweep, Trial
from virnuc_core.training.evaluation import Examples, choose
from virnuc_core.training.training import TrainFile, train_head
from virnuc_core.validation import QUESTIONS, BaselineSummary, Comparison, OverheadFile

_WORDS: Final = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
MARKS, TIMED_OUT = _WORDS["verdicts"], _WORDS["time_out"]
SHOWN: Final = (
    "Stages over time",
    "Utilisation",
    "Throughput",
    "History",
)  # an artifact is below 100 KiB
NIGHTS: Final = 20


@step("trace", "trace {label} on {bench.devices}")
def trace(
    run: RunDir, bench: Bench, engine: EngineSpec, spec: TraceSpec, *, label: str
) -> State[tuple[TraceTable, ...]]:
    """Traces and their tables in `spec.folder`. Some of the run's shards are computed again for it and thrown away."""
    with device_slots(resolve(bench.devices)), run_lock(run.root):
        found = record(bench, engine, spec)
    return done(found, message("traced", found))


@step("split", "split {label}")
def split(run: RunDir, spec: TrainSpec, *, label: str) -> State[Examples]:
    """The rows to learn from and to be judged by. Errors: `InputError` where truth and reads do not fit each other."""
    found = choose(OrfStore.open(run.store), spec)
    return done(found, message("split", found))


@step("train", "train {label}")
def train(
    run: RunDir, examples: Examples, spec: TrainSpec, cuts: RunDir | str, *, label: str
) -> State[TrainFile]:
    """The head in `run/head` with its card, and `train.json` and `train.html`: how well it does on unknown genomes."""
    found = train_head(run, OrfStore.open(run.store), examples, spec, cuts)
    page, card = map(templates().get_template, ("train.html.j2", "model_card.md.j2"))
    write_text_atomically(run.root / "train.html", page.render(found=found))
    write_text_atomically(run.root / "head" / "README.md", card.render(found=found, pictures=False))
    text, summary = card.render(found=found, pictures=True), message("trained", found)
    publish_markdown(on_host(f"head-{label}"), text, summary, run.root / "train.html")
    return done(found, summary)


@step("overhead", "overhead of {label} on {bench.devices}")
def overhead(
    out: Path, bench: Bench, engine: EngineSpec, *, label: str, force: bool = False, **asked: Any
) -> State[OverheadFile]:
    """`checkpoint_overhead.json` of a validate directory; a measurement of the same work is used as it is."""
    progress = progress_artifact(
        f"progress-{label}-overhead", f"Runs with and without what costs, of {label}"
    )
    with device_slots(resolve(bench.devices)), progress as show:
        found = measure_overhead(
            out, bench, engine, force=force and first_attempt(), on_run=show, **asked
        )
    rows = render_rows("overhead.view.j2", pairs=found.pairs)
    publish_table(
        on_host(f"overhead-{label}"), rows, f"What these cost, {label} on {bench.devices}"
    )
    return done(found, message("overhead", found.pairs, median))


@step("precision", "fp32 sequences of {label}")
def precision(
    out: Path, bench: Bench, engine: EngineSpec, sequences: int, *, label: str
) -> State[bool]:
    """About so many sequences in fp32 in `out/fp32`, unless the runs compute in fp32 themselves."""
    with device_slots(resolve(bench.devices)[:1]):
        made = measure_precision(out, bench, engine, sequences)
    return done(
        made,
        f"a part of {label} was embedded in fp32" if made else "the runs are in fp32 themselves",
    )


@step("ceiling", "ceiling of {bench.devices}")
def ceiling(out: Path, bench: Bench, engine: EngineSpec) -> State[ModelFlops]:
    """The ceilings of these devices with these weights. Errors: those of `measure_ceilings`."""
    found = resolve(bench.devices)
    with device_slots(found):
        flops = measure_ceilings(
            bench.models, found, resolve_engine(engine, found[0].kind), out / "logs"
        )
    return done(flops, message("ceiling", flops.esm2_ceiling_tokens_s))


@step("measure", "{name}")
def run_trial(sweep: Sweep, candidate: Candidate, repeat: int, *, name: str) -> State[Trial | str]:
    """One trial of a candidate, or why it cannot run; a trial that was made before, over the same all, is reused."""
    with device_slots(resolve(sweep.bench.devices)):
        found = sweep.trial(candidate, repeat)
    if isinstance(found, str):
        return done(found, f"cannot run: {found}")
    return done(found, message("trial", found), reused=found.reused)


@step("baseline", "baseline {spec.name} on {bench.devices}")
def baseline(
    run: RunDir, bench: Bench, spec: BaselineSpec, *, label: str, force: bool = False
) -> State[BaselineSummary]:
    """The baseline's time and result files in `run`; one of the same reads, weights and devices is used as it is."""
    if force and first_attempt():
        with run_lock(run.root):
            discard(
                run.root, *RUN_FILES
            )  # an error stops here: what stays must not be taken for the new one's
    progress = progress_artifact(f"progress-{label}-baseline", f"Baseline {spec.name} of {label}")
    with device_slots(resolve(bench.devices)), progress as show:
        if spec.source == "recorded" and spec.results is not None:
            take_results(spec.results, run, OrfStore.open(bench.store))
        summary = run_baseline(
            run, bench.store, bench.models, bench.devices, spec, on_progress=show
        )
        show(1.0)
    return done(summary, message("baseline", summary, spec.results), reused=summary.reused)


@step("compare", "compare {label}")
def compare(
    out: Path, names: tuple[str, ...], *, tolerance: float, subset: bool, label: str
) -> State[tuple[Comparison, ...]]:
    """`comparison.json` of a validate directory. `subset`: the baseline covers a part of the reads only."""
    found = compare_runs(out, names, tolerance=tolerance, subset=subset)
    rows = [
        row
        for section in render_sections("correctness.view.j2", comparisons=found)
        for row in section.tables[""]
    ]
    publish_table(f"comparison-{label}", rows, f"Agreement of the runs of {label}")
    return done(found, message("compared", found))


@step("report", "report {label}")
def report(out: Path, profile: Profile, *, history: Path, label: str) -> State[Report]:
    """Every form of the report in `out/report/`, and one event for each verdict."""
    judged = write_report(out, profile, history)
    common = {"profile": profile.name, "report": str(RunDir(out).report.absolute())}
    for criterion in (*judged.criteria, *judged.further):
        target = criterion.target
        wanted = None if target is None else f"{target.op} {target.value:g} {criterion.unit}"
        payload = {"value": criterion.value, "target": wanted, "reason": criterion.reason} | common
        emit(
            f"criterion.{key(criterion.verdict)}",
            f"criterion.{key(criterion.id)}",
            criterion.title,
            payload,
        )
    if (found := judged.regression) is not None:
        payload = found.model_dump(mode="json") | common
        emit(
            f"regression.{key(found.verdict)}",
            f"regression.{key(profile.name)}",
            profile.title,
            payload,
        )
    return done(judged, message("met", judged))


def publish(judged: Report, out: Path, label: str) -> None:
    """The verdicts in the UI, under the same keys each time; on the flow's page they come before those of its tasks."""
    name, folder = judged.profile.name, RunDir(out).report
    told = Markdown(f"**{cell(message('met', judged))}** — {cell(label)}, {cell(name)}")
    publish_table(on_host(f"criteria-{name}"), rows_of("criteria.view.j2", judged), told)
    if judged.accounting is not None:
        publish_table(
            f"reads-{name}",
            rows_of("fates.view.j2", judged),
            f"What became of the reads of {label}",
        )
    if len(judged.scaling) > 1:
        publish_table(
            on_host(f"scaling-{name}"), rows_of("scaling.view.j2", judged), f"Scaling of {label}"
        )
    text = render_template(
        "body.md.j2", judged
    )  # without the settings, which Prefect would show as headings
    publish_markdown(on_host(f"report-{name}"), text, message("met", judged), folder / "report.md")
    charts = [chart for chart in all_charts(judged) if chart[0] in SHOWN]
    text = templates().get_template("charts.md.j2").render(charts=charts)
    publish_markdown(on_host(f"charts-{name}"), text, f"Charts of {label}", folder / "report.html")
    if (kept := RunDir(out).root / REGRESSION).is_file():
        compared = read(kept, RegressionFile)
        nights = trend((*compared.history, compared.entry))[-NIGHTS:]
        publish_table(
            on_host(f"trend-{name}"),
            nights[::-1],
            f"Newest first, of the last {NIGHTS} on these devices",
        )


def emit_outcome(judged: Report, out: Path) -> None:
    """One event for the validation as a whole."""
    payload = {"met": judged.met, "asked": len(judged.asked), "failed": list(judged.missed)}
    payload |= {"report": str(RunDir(out).report.absolute())}
    emit(
        f"validation.{key(judged.outcome)}",
        f"validation.{key(judged.profile.name)}",
        judged.profile.title,
        payload,
    )


def rows_of(template: str, judged: Report) -> Rows:
    """Rows of a report's view as Prefect shows them."""

    def shown(cell: object) -> object:
        return Markdown(MARKS[cell.verdict]) if isinstance(cell, Mark) else cell

    return [
        {name: shown(cell) for name, cell in row.items()} for row in render_rows(template, judged)
    ]


class Approval(Review, RunInput):
    """What the reviewer is asked."""

    verdict: Literal["approved", "rejected", "pending"] = Field(description="The decision")
    reviewer: str = Field(min_length=1, max_length=200, description="Who decides")


def approval_form(judged: Report) -> type[Approval]:
    """What the reviewer is asked, each question with its figures; the UI may hide the table above the form, and renders
    what it asks as Markdown, in which a number at the start would become a list of its own."""
    above = render_template("approval.md.j2", judged, rows=rows_of("criteria.view.j2", judged))
    asked: dict[str, Any] = {}
    for name, question in QUESTIONS.items():
        asked[name] = (
            Answer,
            Field("not answered", description=f"{question} {message(name, judged)}".strip()),
        )
    return create_model("Approval", __base__=Approval, **asked).with_initial_data(description=above)
