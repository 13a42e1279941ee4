"""`virnuc profile`: profiler traces, started by hand."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flows import settings
from flows.options import parameters_of, settings_of
from flows.parameters import ProfileSettings
from virnuc_core.config import EngineSpec


def profile(words: Sequence[str]) -> int:
    """Record a few shards; prints the tables and where the traces lie."""
    text = "Run the reads, then record a few shards with torch's profiler: traces, and tables of stages and kernels."
    spec, arguments = settings_of(words, "profile", text, ProfileSettings, ("reads",))
    settings.prepare()
    from flows import preflight

    preflight.check(spec, reads=spec.reads, models=spec.models, out=spec.out, base=EngineSpec())
    from flows.profile import profile as flow
    from flows.running import run_flow

    state = run_flow(flow, parameters_of(spec), debug=arguments.debug)
    path = spec.out / "telemetry" / "traces" / "profile.md"
    sys.stdout.write(path.read_text(encoding="utf-8"))
    sys.stdout.write(f"\n{state.message}\n")
    return 0
