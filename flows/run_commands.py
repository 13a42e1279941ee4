"""Flows started by hand. What can be refused at once is refused before Prefect starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flows import settings
from flows.options import parameters_of, settings_of
from flows.parameters import InboxSettings, PredictSettings, ScaleSettings, TrainSettings, ValidateSettings
from virnuc_core.config import EngineSpec, load_profile

CRITERION_FAILED = 5
PARTIAL = 6  # done, but some rows had to be set aside


def predict(words: Sequence[str]) -> int:
    """Say which reads are viral."""
    spec, arguments = settings_of(words, "predict", "Say which reads are viral.", PredictSettings, ("reads",))
    settings.prepare()
    from flows import preflight

    preflight.check(spec, reads=spec.reads, models=spec.models, out=spec.out, base=EngineSpec())
    from flows.predict import predict as flow
    from flows.running import run_flow

    state = run_flow(flow, parameters_of(spec), debug=arguments.debug)
    sys.stdout.write(f"{state.message}\nResults: {spec.out}\n")
    from virnuc_core.pipeline import read_summary
    from virnuc_core.rundir import RunDir

    summary = read_summary(RunDir(spec.out))
    return PARTIAL if summary is not None and summary.fates["failed"] else 0


def predict_inbox(words: Sequence[str]) -> int:
    """Predict each new file of a folder, once."""
    spec, arguments = settings_of(words, "predict-inbox", "Predict each new file of a folder, once.", InboxSettings)
    settings.prepare()
    from flows import preflight

    preflight.check(spec, reads=(), models=spec.models, out=spec.out, base=EngineSpec())
    from flows.predict_inbox import predict_inbox as flow
    from flows.running import run_flow

    state = run_flow(flow, parameters_of(spec), debug=arguments.debug)
    sys.stdout.write(f"{state.message}\nFates: {spec.out / 'inbox.tsv'}\n")
    return 0


def train(words: Sequence[str]) -> int:
    """Fit the head on labelled reads."""
    spec, arguments = settings_of(words, "train", "Fit the head on labelled reads.", TrainSettings, ("reads",))
    settings.prepare()
    from flows import preflight

    preflight.check(spec, reads=spec.reads, models=spec.models, out=spec.out, base=EngineSpec())
    from flows.running import run_flow
    from flows.train import train as flow

    state = run_flow(flow, parameters_of(spec), debug=arguments.debug)
    where = f"{spec.models / 'head'} (installed)" if spec.install else str(spec.out / "head")
    sys.stdout.write(f"{state.message}\nHead: {where}\n")
    return 0


def validate(words: Sequence[str]) -> int:
    """Prove this machine against a profile; 5 when a criterion was not met, or a reviewer said no."""
    text = "Prove this machine, with these weights, against a profile."
    spec, arguments = settings_of(words, "validate", text, ValidateSettings)
    profile = load_profile(spec.profile)
    settings.prepare()
    from flows import preflight

    preflight.check(spec, reads=spec.reads, models=spec.models, out=spec.out, base=profile.engine)
    from flows.running import run_flow, ui_hint
    from flows.validate import validate as flow

    state = run_flow(flow, parameters_of(spec), debug=arguments.debug)
    folder = spec.out / "report"
    sys.stdout.write((folder / "report.txt").read_text(encoding="utf-8"))
    sys.stdout.write(f"\n{state.message}\nReport: {folder / 'report.html'}\n")
    ui_hint(state.state_details.flow_run_id)
    from tasks.states import REJECTED
    from virnuc_core.report.render import read_report

    missed = state.name == REJECTED or read_report(folder / "report.json").failed
    return CRITERION_FAILED if missed else 0


def scale(words: Sequence[str]) -> int:
    """Measure the scaling curve."""
    text = "Run the same reads on one, two, four, … devices and measure how the time falls."
    spec, arguments = settings_of(words, "scale", text, ScaleSettings)
    profile = load_profile(spec.profile)
    settings.prepare()
    from flows import preflight

    preflight.check(spec, reads=spec.reads, models=spec.models, out=spec.out, base=profile.engine)
    from flows.running import run_flow
    from flows.scale import scale as flow

    state = run_flow(flow, parameters_of(spec), debug=arguments.debug)
    sys.stdout.write(f"{state.message}\nReport: {spec.out / 'report' / 'report.html'}\n")
    return 0
