"""The step that embeds a sample of the sequences in fp32, to compare the embeddings with."""

from pathlib import Path

from virnuc.tasks.device_slots import device_slots
from virnuc.tasks.outcome import Outcome, completed
from virnuc.tasks.task import retrying_task
from virnuc_core.config import EngineSpec
from virnuc_core.engine.devices import resolve
from virnuc_core.tools.bench import Bench
from virnuc_core.tools.precision import measure_precision


@retrying_task("precision", "fp32 sequences of {label}")
def embed_in_fp32(
    out: Path, bench: Bench, engine: EngineSpec, sequences: int, *, label: str
) -> Outcome[bool]:
    """Embed some sequences in fp32 on the first device, unless the runs compute in fp32 themselves.

    Args:
        out: The directory of the validation; the embeddings are written to `out/fp32`.
        bench: The reads, models and devices.
        engine: Settings of the runs.
        sequences: About how many sequences to embed.
        label: The name of the sample, for names in the UI.

    Returns:
        An outcome whose result says whether anything was embedded.
    """
    first_device = resolve(bench.devices)[:1]
    with device_slots(first_device):
        is_embedded = measure_precision(out, bench, engine, sequences)
    if is_embedded:
        text = f"a part of {label} was embedded in fp32"
    else:
        text = "the runs are in fp32 themselves"
    return completed(is_embedded, text)
