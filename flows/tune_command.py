"""`virnuc tune`: the sweep, started by hand."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flows import settings
from flows.options import parameters_of, settings_of
from flows.parameters import TuneSettings
from virnuc_core.config import load_profile


def tune(words: Sequence[str]) -> int:
    """Find the fastest settings; says them and where the file for --settings lies."""
    text = "Measure engine settings on this machine and these reads, and write the fastest that leave results alone."
    spec, arguments = settings_of(words, "tune", text, TuneSettings, ("reads",))
    profile = load_profile(spec.profile)
    settings.prepare()
    from flows import preflight

    preflight.check(spec, reads=spec.reads, models=spec.models, out=spec.out, base=profile.engine)
    from flows.running import run_flow
    from flows.tune import SETTINGS
    from flows.tune import tune as flow

    state = run_flow(flow, parameters_of(spec), debug=arguments.debug)
    sys.stdout.write(
        f"{state.message}\nUse it: --settings {spec.out / SETTINGS}\nAll figures: {spec.out / 'tune.json'}\n"
    )
    return 0
