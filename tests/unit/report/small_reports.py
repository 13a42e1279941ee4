"""Reports of a few parts, for tests of what is shown of each part."""

from __future__ import annotations

from typing import Any

from virnuc_core.profiles import Target
from virnuc_core.report.model import Criterion, Report, ScalingMetrics


def criterion(**changes: Any) -> Criterion:
    """Return a criterion that was missed by half a percent."""
    base = Criterion(
        id="packing",
        perf_id="PERF-05",
        title="Packing efficiency",
        definition="real tokens ÷ slots",
        unit="%",
        value=89.5,
        target=Target(op=">", value=90),
        verdict="fail",
        reason="",
        samples=12_345,
        samples_of="batches",
        device="2x RTX 4090",
        profile_line="packing_efficiency > 90",
        raw=(),
    )
    return base.model_copy(update=changes)


def scaling_figure(**changes: Any) -> ScalingMetrics:
    """Return a measurement on two devices."""
    base = ScalingMetrics(
        num_gpus=2,
        time_seconds=5.0,
        times_s=(5.0,),
        speedup=1.96,
        efficiency=0.98,
        protein_scaling=None,
        dna_scaling=None,
    )
    return base.model_copy(update=changes)


def report(*criteria: Criterion, **parts: Any) -> Report:
    """Return a report of some criteria; what is not named is absent."""
    fields: dict[str, Any] = dict.fromkeys(Report.model_fields)
    fields |= {"scaling": (), "comparisons": (), "checks": (), "criteria": criteria, "runs": ()}
    return Report.model_construct(**(fields | parts))
