"""How fast the encoders are, beside what their matrix products alone can sustain on the same device in the same run.

    python tests/benchmarks/bench_encoders.py                         # ESM-2 3B and DNABERT-S on the GPU
    python tests/benchmarks/bench_encoders.py --variants fused,reference --lengths 52 --budgets 16384
    python tests/benchmarks/bench_encoders.py --device cpu --seconds 0.2   # tiny models: a smoke test

A variant is what runs the layers: our kernels (fused), the same with GELU by tanh (fused-tanh), or plain torch
(reference).
The products alone are measured with what runs use, and in int8 also with the library behind torch. The fastest
one is the ceiling. Products of fp8 are a reference. Energy is that of the card's own counter.
Weights are random; nothing is written but the JSON file.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from virnuc_core.encoders.backends import choose_backend
from virnuc_core.encoders.convert import random_tensor
from virnuc_core.encoders.layers import Calibration, InputStatistics
from virnuc_core.encoders.model_config import (
    DNABERT_SIZES,
    ESM2_SIZES,
    PRODUCTS,
    DnabertShape,
    Esm2Shape,
)
from virnuc_core.encoders.models import DnabertS, Esm2
from virnuc_core.encoders.precision import Resolved, resolve_precision
from virnuc_core.encoders.quantise import CalibrationRecorder
from virnuc_core.encoders.tokenize import PackedBatch
from virnuc_core.errors import VirnucError
from virnuc_core.runfiles import ModelFlops
from virnuc_core.tools.ceiling import (
    MAX_PENDING,
    Read,
    linear_products,
    measure_product,
    power_reader,
    product_rate,
)

# dense tensor-core peaks of the datasheets, TFLOP/s with float32 accumulation: 16-bit, 8-bit
DATASHEET = {
    "H200": (989.0, 1979.0),
    "H100": (989.0, 1979.0),
    "A100": (312.0, None),
    "RTX 4090": (165.2, 330.3),
}

Name = Literal["esm2", "dnabert_s"]
NAMES: tuple[Name, ...] = ("esm2", "dnabert_s")
PAD = {"esm2": 1, "dnabert_s": 3}


class Sustained(NamedTuple):
    """A stretch of equal calls."""

    elapsed_s: float
    calls: int
    sm_mhz: int | None  # towards the end
    watts: float | None
    joules: float | None  # all calls
    at_power_limit: bool | None  # towards the end


def settle(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sustain(
    step: Callable[[], object], seconds: float, device: torch.device, read: Read | None
) -> Sustained:
    """Run `step` for at least `seconds`, never more than a few calls ahead of the device."""
    settle(device)
    events: list[torch.cuda.Event] = []
    calls, mhz, watts, at_power_limit = 0, None, None, None
    first_energy_j = None if read is None else read().energy_j
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or calls == 0:
        step()
        calls += 1
        if device.type == "cuda":
            events.append(torch.cuda.Event())
            events[-1].record()
            if len(events) > MAX_PENDING:
                events.pop(0).synchronize()
            if mhz is None and time.perf_counter() - start > 0.8 * seconds:
                with contextlib.suppress(Exception):  # not every driver tells
                    mhz, watts = torch.cuda.clock_rate(device), torch.cuda.power_draw(device) / 1000
                if read is not None:
                    at_power_limit = read().is_power_limited
    settle(device)
    elapsed_s = time.perf_counter() - start
    joules = None
    last_energy_j = None if read is None else read().energy_j
    if first_energy_j is not None and last_energy_j is not None:
        joules = last_energy_j - first_energy_j
    return Sustained(elapsed_s, calls, mhz, watts, joules, at_power_limit)


def batch_of(
    name: Name, vocab: int, length: int, slots: int, capacity: int, device: torch.device
) -> PackedBatch:
    """Make a batch of random rows of `length` tokens, as many as fit."""
    rows = max(1, min(slots // length, capacity))
    generator = torch.Generator().manual_seed(length)
    if name == "esm2":
        first_id, end_id, begin_token, end_token = 4, 24, 0, 2
    else:
        first_id, end_id, begin_token, end_token = 5, vocab, 1, 2
    tokens = torch.randint(first_id, end_id, (slots,), generator=generator)
    starts = torch.arange(rows) * length
    tokens[starts] = begin_token
    tokens[starts + length - 1] = end_token
    n_real = rows * length
    tokens[n_real:] = PAD[name]
    cu_seqlens = torch.full((capacity + 1,), n_real, dtype=torch.int32)
    cu_seqlens[: rows + 1] = torch.arange(rows + 1) * length
    max_seqlen = max(64, 1 << (length - 1).bit_length())
    return PackedBatch(tokens, cu_seqlens, rows, max_seqlen, n_real).to(device)


def mixed_batch(name: Name, vocab: int, device: torch.device) -> PackedBatch:
    """Make a batch of 128 rows of 8 to 168 tokens, for the cosines."""
    rows = 128
    lengths = torch.randint(8, 169, (rows,), generator=torch.Generator().manual_seed(1))
    ends = lengths.cumsum(0)
    n_real = int(ends[-1])
    slots = math.ceil(n_real / 256) * 256
    tokens = batch_of(name, vocab, 8, slots, rows, torch.device("cpu")).tokens
    cu_seqlens = torch.cat((torch.zeros(1), ends)).to(torch.int32)
    return PackedBatch(tokens, cu_seqlens, rows, 256, n_real).to(device)


def calibrate(shape: Esm2Shape, device: torch.device) -> Calibration:
    """Measure the inputs of the linear layers of ESM-2 on a batch of random rows, for int8."""
    probe = Esm2(
        shape,
        partial(random_tensor, shape),
        device,
        precision="fp16" if device.type == "cuda" else "fp32",
        attention="reference",
    )
    recorder = CalibrationRecorder(probe)
    probe.apply_linear = recorder
    probe.embed(mixed_batch("esm2", shape.vocab, device))
    tables = recorder.tensors()
    calibration = []
    for i in range(shape.layers):
        statistics = {name: InputStatistics(*tables[f"layers.{i}.{name}"]) for name in PRODUCTS}
        calibration.append(statistics)
    return calibration


def build(
    shape: Esm2Shape | DnabertShape, precision: Resolved, variant: str, device: torch.device
) -> Esm2 | DnabertS:
    """The encoder of a variant with random weights; `VirnucError` when it cannot run on the device."""
    if variant not in ("fused", "fused-tanh", "reference"):
        raise SystemExit(f"variant '{variant}': wanted fused, fused-tanh or reference")
    backend, _, gelu = variant.partition("-")
    way: Any = {
        "precision": precision,
        "attention": choose_backend(backend, shape.head_dim, device),  # type: ignore[arg-type]
    }
    if gelu:
        if not isinstance(shape, Esm2Shape) or precision not in ("fp16", "bf16"):
            raise VirnucError("GELU by tanh is for ESM-2 in fp16 and bf16")
        way["gelu"] = gelu
    if precision == "int8":
        if not isinstance(shape, Esm2Shape):
            raise VirnucError("int8 is for ESM-2; in an int8 run DNABERT-S computes in fp16")
        way["calibration"] = calibrate(shape, device)
    if isinstance(shape, Esm2Shape):
        return Esm2(shape, partial(random_tensor, shape), device, **way)
    return DnabertS(shape, partial(random_tensor, shape), device, **way)


def profile(embed: Callable[[], object], device: torch.device) -> list[tuple[str, float, int]]:
    """Device milliseconds and calls of each kernel in one batch, largest first."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        embed()
        settle(device)
    rows = [
        (e.key, e.self_device_time_total / 1000, e.count)
        for e in trace.key_averages()
        if e.self_device_time_total
    ]
    return sorted(rows, key=lambda row: -row[1])[:14]


class Bench:
    """One run of the benchmark."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.device_name = (
            torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        )
        self.deadline = time.perf_counter() + options.time_limit
        self.read: Read | None = None
        if self.device.type == "cuda":
            self.read = power_reader(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")
        kinds = ("measured", "ceilings", "cosines", "not_run", "profiles")
        self.found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}

    def run(self) -> None:
        """Everything that was asked for, one precision after the other."""
        for name in self.options.encoders:
            shape = (
                ESM2_SIZES[self.options.esm2]
                if name == "esm2"
                else DNABERT_SIZES[self.options.dnabert_s]
            )
            reference = None
            if self.options.accuracy:
                plain = build(shape, "fp32", "reference", self.device)
                reference = plain.embed(mixed_batch(name, shape.vocab, self.device)).cpu()
                del plain
            for precision_name in self.options.precisions:
                gc.collect()  # the weights of the precision before
                try:
                    precision = resolve_precision(precision_name, self.device)
                    self.precision(name, shape, precision, reference)
                except VirnucError as error:
                    self.note(
                        "not_run",
                        encoder=name,
                        precision=precision_name,
                        variant="all",
                        reason=str(error),
                    )

    def precision(
        self, name: Name, shape: Any, precision: Resolved, expected: Tensor | None
    ) -> None:
        """Ceilings, then every variant, of one encoder in one precision."""
        limits: dict[int, float] = {}
        for variant in self.options.variants[name]:
            try:
                encoder = build(shape, precision, variant, self.device)
                for slots in self.options.budgets if not limits else ():
                    limits[slots] = self.ceiling(name, encoder, slots)
                if expected is not None:
                    got = encoder.embed(mixed_batch(name, shape.vocab, self.device)).cpu()
                    each = torch.nn.functional.cosine_similarity(
                        got.double(), expected.double(), dim=1
                    )
                    result = {
                        "min": float(each.min()),
                        "p1": float(each.quantile(0.01)),
                        "mean": float(each.mean()),
                    }
                    self.note(
                        "cosines", encoder=name, precision=precision, variant=variant, **result
                    )
                for slots, length in itertools.product(
                    self.options.budgets, self.options.lengths[name]
                ):
                    if time.perf_counter() > self.deadline:
                        raise TimeoutError(f"{length}/{slots} and further: time limit of the run")
                    self.one(name, variant, encoder, length, slots, limits[slots])
            except Exception as error:  # noqa: BLE001 - what cannot run here is said, the rest goes on
                reason = f"{type(error).__name__}: {str(error)[:300]}"
                self.note(
                    "not_run", encoder=name, precision=precision, variant=variant, reason=reason
                )

    def ceiling(self, name: Name, encoder: Esm2 | DnabertS, slots: int) -> float:
        """Tokens/s of the linear layers alone, with the fastest product of this precision."""
        rates = []
        with torch.inference_mode():
            for product in linear_products(encoder.layers, slots, self.device):
                sustained = measure_product(product, self.options.seconds, self.read)
                rate = product_rate(product, name, self.device_name, slots, sustained)
                rates.append(rate)
                found = rate.model_dump(exclude={"encoder", "device"})
                self.note(
                    "ceilings", encoder=name, precision=encoder.precision, slots=slots, **found
                )
        (fastest,) = ModelFlops.fastest(rates)
        assert fastest.tokens_per_s is not None  # the product that the encoder uses has run
        return fastest.tokens_per_s

    def one(
        self,
        name: Name,
        variant: str,
        encoder: Esm2 | DnabertS,
        length: int,
        slots: int,
        limit: float,
    ) -> None:
        """One line of the table."""
        batch = batch_of(name, encoder.shape.vocab, length, slots, max(1, slots // 8), self.device)
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        first_s = sustain(lambda: encoder.embed(batch), 0.0, self.device, None).elapsed_s
        ran = sustain(lambda: encoder.embed(batch), self.options.seconds, self.device, self.read)
        joules = None
        if ran.joules is not None:
            joules = ran.joules / (batch.real_tokens * ran.calls) * 1e6
        tokens = batch.real_tokens * ran.calls / ran.elapsed_s
        linear, attention = (
            2 * encoder.shape.linear_weights,
            4 * encoder.width * encoder.shape.layers * length,
        )
        tflops = tokens * (linear + attention) / 1e12
        peak = self.datasheet(encoder.precision)
        result = {
            "encoder": name,
            "precision": encoder.precision,
            "variant": variant,
            "row_tokens": length,
            "slots": slots,
            "tokens_per_s": tokens,
            "rows_per_s": tokens / length,
            "ceiling_tokens_per_s": limit,
            "share_of_ceiling": tokens / limit,
            "joules_per_million_tokens": joules,
            "tflops": tflops,
            "mfu_datasheet": None if peak is None else tflops / peak,
            "peak_gib": torch.cuda.max_memory_allocated(self.device) / 2**30 if on_cuda else None,
            "first_s": first_s,  # to the first result: kernels are compiled, or found in the cache on disk
            **ran._asdict(),
        }
        self.note("measured", **result)
        if variant in self.options.profile:
            kernels = profile(lambda: encoder.embed(batch), self.device)
            self.note("profiles", variant=variant, slots=slots, row_tokens=length, kernels=kernels)

    def datasheet(self, precision: Resolved) -> float | None:  # TFLOP/s, where it is known
        peaks = next(
            (peaks for part, peaks in DATASHEET.items() if part in self.device_name), (None, None)
        )
        return None if precision == "fp32" else peaks[precision == "int8"]

    def note(self, kind: str, **found: Any) -> None:
        """Keep and print what was found."""
        self.found[kind].append(found)
        print(f"{kind}: {json.dumps(found, indent=1 if kind == 'profiles' else None)}", flush=True)

    def record(self) -> dict[str, Any]:
        """All of it, for the JSON file."""
        return {
            "schema_version": 3,
            "command": shlex.join([Path(sys.executable).name, *sys.argv]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": self.device_name,
            **{name: getattr(self.options, name) for name in ("esm2", "dnabert_s")},
            **self.found,
        }


def options_from(arguments: list[str]) -> argparse.Namespace:
    """The command line."""

    def words(text: str) -> list[str]:
        return [word.strip() for word in text.split(",") if word.strip()]

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--encoders", type=words, default=list(NAMES))
    parser.add_argument("--esm2", choices=list(ESM2_SIZES), help="t36_3B on CUDA, else tiny")
    parser.add_argument("--dnabert-s", choices=list(DNABERT_SIZES), help="base on CUDA, else tiny")
    parser.add_argument("--precisions", type=words, help="fp16,bf16,int8 on CUDA, else fp32")
    parser.add_argument("--variants", type=words, help="fused on CUDA, else reference")
    parser.add_argument(
        "--lengths", type=numbers, default=[52, 102, 168], help="tokens of a row of ESM-2"
    )
    parser.add_argument(
        "--dna-lengths", type=numbers, default=[35], help="tokens of a row of DNABERT-S"
    )
    parser.add_argument(
        "--budgets",
        type=numbers,
        default=[16384],
        help="token slots of a batch, e.g. 8192,16384,65536",
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="each measurement lasts at least this long"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=480.0,
        help="seconds for the whole run; the rest is named",
    )
    parser.add_argument(
        "--profile",
        type=words,
        default=[],
        help="variants whose kernels are listed, one batch each",
    )
    parser.add_argument(
        "--accuracy",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="cosines against fp32",
    )
    parser.add_argument("--json", type=Path, help="write everything here")
    options = parser.parse_args(arguments)
    cuda = options.device.startswith("cuda")
    options.esm2 = options.esm2 or ("t36_3B" if cuda else "tiny")
    options.dnabert_s = options.dnabert_s or ("base" if cuda else "tiny")
    options.precisions = options.precisions or (["fp16", "bf16", "int8"] if cuda else ["fp32"])
    options.variants = dict.fromkeys(NAMES, options.variants or ["fused" if cuda else "reference"])
    options.lengths = {"esm2": options.lengths, "dnabert_s": options.dna_lengths}
    return options


def main(arguments: list[str]) -> int:
    """Measure, print the table, write the JSON; 1 when nothing could be measured."""
    options = options_from(arguments)
    bench = Bench(options)
    with contextlib.suppress(KeyboardInterrupt):
        bench.run()
    if bench.found["measured"]:
        table = pd.DataFrame(bench.found["measured"]).sort_values(
            ["encoder", "precision", "slots", "row_tokens"]
        )
        print(table.to_string(index=False, float_format="{:,.3f}".format))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(bench.record(), indent=1) + "\n", encoding="utf-8")
    return 0 if bench.found["measured"] else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
