"""How fast the encoders are, beside what their matrix products alone can sustain on the same device in the same run.

    python tests/benchmarks/bench_encoders.py                         # ESM-2 3B and DNABERT-S on the GPU
    python tests/benchmarks/bench_encoders.py --variants kernels+fused,compiled+varlen --lengths 52 --budgets 16384
    python tests/benchmarks/bench_encoders.py --device cpu --esm2 tiny --dnabert-s tiny --seconds 0.2   # a smoke test

A variant is a list of features joined by `+`: how (eager, compiled or kernels), parts of kernels (residual, gated),
the attention (varlen, fused or reference), graph.
Weights are random; nothing is written but the JSON file.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import itertools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from virnuc_core.encoders.attention import choose_backend
from virnuc_core.encoders.ceiling import AHEAD, linear_pass, products
from virnuc_core.encoders.checkpoint import RandomTensors
from virnuc_core.encoders.dnabert_s import DnabertS, place_dnabert
from virnuc_core.encoders.esm2 import Esm2, place_esm2
from virnuc_core.encoders.graphs import Graphed
from virnuc_core.encoders.model_config import DNABERT_SIZES, ESM2_SIZES, DnabertShape, Esm2Shape
from virnuc_core.encoders.packed import Encoder, PackedBatch
from virnuc_core.encoders.precision import Resolved, resolve_precision
from virnuc_core.encoders.tuning import Tuning
from virnuc_core.errors import VirnucError

SCHEMA_VERSION = 1
PROFILED_KERNELS = 14

# dense tensor-core peaks of the datasheets, TFLOP/s with float32 accumulation: 16-bit, 8-bit
DATASHEET = {"H200": (989.0, 1979.0), "H100": (989.0, 1979.0), "A100": (312.0, None), "RTX 4090": (165.2, 330.3)}

ESM2_VARIANTS = "compiled+varlen,compiled+fused,kernels+fused,kernels+residual+fused,kernels+residual+fused+graph"
DNABERT_VARIANTS = (
    "compiled+fused,kernels+fused,kernels+residual+fused,kernels+residual+gated+fused,kernels+fused+graph"
)
CPU_VARIANTS = "eager+reference"

Name = Literal["esm2", "dnabert_s"]
NAMES: tuple[Name, ...] = ("esm2", "dnabert_s")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of computing an encoder."""

    text: str
    attention: Literal["varlen", "fused", "reference"]
    compiled: bool
    graph: bool
    tuning: Tuning

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read `kernels+residual+fused`; `SystemExit` names a feature that is not known."""
        features = set(text.split("+"))
        known = {"eager", "compiled", "kernels", "residual", "gated", "graph", "varlen", "fused", "reference"}
        if unknown := features - known:
            raise SystemExit(f"variant '{text}': {', '.join(sorted(unknown))} is not known")
        backends = features & {"varlen", "fused", "reference"}
        if len(backends) != 1 or len(features & {"eager", "compiled", "kernels"}) != 1:
            raise SystemExit(f"variant '{text}': name one of eager, compiled, kernels and one attention")
        tuning = Tuning(
            kernels="kernels" in features,
            residual_product="residual" in features,
            gated_product="gated" in features,
        )
        attention = cast(Literal["varlen", "fused", "reference"], backends.pop())
        return cls(text, attention, "compiled" in features, "graph" in features, tuning)


@dataclass(frozen=True, slots=True)
class Measured:
    """One line of the table."""

    encoder: Name
    precision: Resolved
    variant: str
    row_tokens: int
    slots: int
    rows: int
    tokens_per_s: float
    rows_per_s: float
    ceiling_tokens_per_s: float
    share_of_ceiling: float
    tflops: float
    mfu_datasheet: float | None
    peak_gib: float | None
    compile_s: float
    cached_compile_s: float | None
    sustained_s: float
    batches: int
    sm_mhz: int | None
    watts: float | None


@dataclass(frozen=True, slots=True)
class Sustained:
    """A stretch of equal calls."""

    elapsed_s: float
    calls: int
    sm_mhz: int | None  # towards the end
    watts: float | None


def settle(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sustain(step: Callable[[], object], seconds: float, device: torch.device) -> Sustained:
    """Run `step` for at least `seconds`, never more than a few calls ahead of the device."""
    settle(device)
    events: list[torch.cuda.Event] = []
    calls, mhz, watts = 0, None, None
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or calls == 0:
        step()
        calls += 1
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            events.append(event)
            if len(events) > AHEAD:
                events.pop(0).synchronize()
        if mhz is None and time.perf_counter() - start > 0.8 * seconds:
            mhz, watts = sensors(device)
    settle(device)
    return Sustained(time.perf_counter() - start, calls, mhz, watts)


def sensors(device: torch.device) -> tuple[int | None, float | None]:
    """SM clock in MHz and board power in W, where the device tells."""
    if device.type != "cuda" or importlib.util.find_spec("pynvml") is None:
        return None, None
    with contextlib.suppress(Exception):  # not every driver tells
        return torch.cuda.clock_rate(device), torch.cuda.power_draw(device) / 1000
    return None, None


def ceiling(weights: Any, slots: int, seconds: float, device: torch.device) -> dict[str, Any]:
    """Tokens/s of a model that were nothing but its linear layers; inputs of FP8 layers are already quantised."""
    step = linear_pass(weights, slots, device)
    with torch.inference_mode():
        step()
        ran = sustain(step, seconds, device)
    tokens_per_s = slots * ran.calls / ran.elapsed_s
    flops = 2.0 * sum(one.weight.numel() for layer in weights.layers for one in products(layer))
    return {"tokens_per_s": tokens_per_s, "tflops": flops * tokens_per_s / 1e12, **asdict(ran)}


def batch_of(
    name: Name, vocab: int, length: int, slots: int, capacity: int, pad: int, device: torch.device
) -> PackedBatch:
    """Rows of `length` tokens filling the slots as far as they go."""
    rows = max(1, min(slots // length, capacity))
    generator = torch.Generator().manual_seed(length)
    first, last = (4, 24) if name == "esm2" else (5, vocab)
    tokens = torch.randint(first, last, (slots,), generator=generator)
    begin = torch.arange(rows) * length
    tokens[begin], tokens[begin + length - 1] = (0, 2) if name == "esm2" else (1, 2)
    tokens[rows * length :] = pad
    bounds = torch.full((capacity + 1,), rows * length, dtype=torch.int32)
    bounds[: rows + 1] = torch.arange(rows + 1) * length
    longest = max(64, 1 << (length - 1).bit_length())
    return PackedBatch(tokens, bounds, rows, longest, rows * length).to(device, non_blocking=False)


def place(shape: Esm2Shape | DnabertShape, precision: Resolved, device: torch.device) -> Any:
    """Random weights on the device, in the form `precision` runs on."""
    if isinstance(shape, Esm2Shape):
        return place_esm2(RandomTensors(shape), shape, precision, device)
    return place_dnabert(RandomTensors(shape), shape, precision, device)


def build(
    name: Name,
    shape: Esm2Shape | DnabertShape,
    weights: Any,
    precision: Resolved,
    variant: Variant,
    device: torch.device,
) -> tuple[Esm2 | DnabertS, Encoder]:
    """The encoder, and what is called to embed: itself or its recorded graph."""
    torch.compiler.reset()
    bias: Literal["rotary", "alibi"] = "rotary" if name == "esm2" else "alibi"
    choose_backend(variant.attention, bias=bias, head_dim=shape.head_dim, precision=precision, device=device)
    common: Any = {"precision": precision, "attention": variant.attention, "compile": variant.compiled}
    encoder: Esm2 | DnabertS
    if isinstance(shape, Esm2Shape):
        encoder = Esm2(shape, weights, tuning=variant.tuning, **common)
    else:
        encoder = DnabertS(shape, weights, pad_id=3, tuning=variant.tuning, **common)
    return encoder, Graphed(encoder, device) if variant.graph else encoder


def mixed_batch(name: Name, shape: Esm2Shape | DnabertShape, device: torch.device) -> PackedBatch:
    """128 rows of 8 to 168 tokens, for the cosines."""
    lengths = torch.randint(8, 169, (128,), generator=torch.Generator().manual_seed(1))
    ends = lengths.cumsum(0)
    slots = -(-int(ends[-1]) // 256) * 256
    flat = batch_of(name, shape.vocab, 8, slots, 128, 1 if name == "esm2" else 3, torch.device("cpu"))
    bounds = torch.cat((torch.zeros(1), ends)).to(torch.int32)
    return PackedBatch(flat.tokens, bounds, 128, 256, int(ends[-1])).to(device, non_blocking=False)


def profile(embed: Callable[[], object], device: torch.device) -> list[tuple[str, float, int]]:
    """Device milliseconds and calls of each kernel in one batch, largest first."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        embed()
        settle(device)
    rows = [(e.key, e.self_device_time_total / 1000, e.count) for e in trace.key_averages() if e.self_device_time_total]
    return sorted(rows, key=lambda row: -row[1])[:PROFILED_KERNELS]


class Bench:
    """One run of the benchmark."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.deadline = time.perf_counter() + options.time_limit
        self.measured: list[Measured] = []
        self.skipped: list[dict[str, Any]] = []
        self.ceilings: list[dict[str, Any]] = []
        self.cosines: list[dict[str, Any]] = []
        self.profiles: list[dict[str, Any]] = []

    def run(self) -> None:
        """Everything that was asked for, one precision after the other, so that weights lie on the device once."""
        for name in self.options.encoders:
            shape = (ESM2_SIZES if name == "esm2" else DNABERT_SIZES)[self._size(name)]
            expected = self._expected(name, shape)
            for asked in self.options.precisions:
                try:
                    precision = resolve_precision(asked, self.device)
                except VirnucError as error:
                    self._skip(name, asked, "all", 0, 0, str(error))
                    continue
                weights = place(shape, precision, self.device)
                self._precision(name, shape, precision, weights, expected)
                del weights
                self._free()

    def _late(self) -> bool:
        return time.perf_counter() + self.options.seconds > self.deadline

    def _size(self, name: Name) -> Any:
        return self.options.esm2 if name == "esm2" else self.options.dnabert_s

    def _free(self) -> None:
        gc.collect()
        torch.compiler.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _expected(self, name: Name, shape: Esm2Shape | DnabertShape) -> Tensor | None:
        """Embeddings of the mixed batch in float32 by the reference attention."""
        if not self.options.accuracy:
            return None
        weights = place(shape, "fp32", self.device)
        plain = Variant.parse("eager+reference")
        encoder, _ = build(name, shape, weights, "fp32", plain, self.device)
        result = encoder.embed(mixed_batch(name, shape, self.device)).cpu()
        del encoder, weights
        self._free()
        return result

    def _precision(self, name: Name, shape: Any, precision: Resolved, weights: Any, expected: Tensor | None) -> None:
        limits: dict[int, float] = {}
        for slots in self.options.budgets:
            if self._late():
                break
            found = ceiling(weights, slots, self.options.seconds, self.device)
            limits[slots] = found["tokens_per_s"]
            self.ceilings.append({"encoder": name, "precision": precision, "slots": slots, **found})
            print(f"ceiling {name} {precision} {slots}: {found['tokens_per_s']:,.0f} tokens/s", flush=True)
        for text in self.options.variants[name]:
            variant = Variant.parse(text)
            compared = expected is None
            for slots, length in itertools.product(self.options.budgets, self.options.lengths[name]):
                if slots not in limits or self._late():
                    self._skip(name, precision, text, length, slots, "time limit of the run")
                    continue
                try:
                    pair = build(name, shape, weights, precision, variant, self.device)
                    self._one(name, precision, variant, pair, length, slots, limits[slots])
                    if not compared and expected is not None:
                        self._compare(name, precision, variant, pair[0], expected)
                        compared = True
                except Exception as error:  # noqa: BLE001 - what cannot run here is said, the rest goes on
                    self._skip(name, precision, text, length, slots, f"{type(error).__name__}: {str(error)[:300]}")

    def _compare(
        self, name: Name, precision: Resolved, variant: Variant, encoder: Esm2 | DnabertS, expected: Tensor
    ) -> None:
        """Cosines of pooled embeddings against float32."""
        got = encoder.embed(mixed_batch(name, encoder.shape, self.device)).cpu()
        each = torch.nn.functional.cosine_similarity(got.double(), expected.double(), dim=1)
        found = {"min": float(each.min()), "p1": float(each.quantile(0.01)), "mean": float(each.mean())}
        self.cosines.append({"encoder": name, "precision": precision, "variant": variant.text, **found})
        print(f"cosine  {name} {precision} {variant.text}: " + " ".join(f"{k} {v:.8f}" for k, v in found.items()))

    def _one(
        self,
        name: Name,
        precision: Resolved,
        variant: Variant,
        pair: tuple[Esm2 | DnabertS, Encoder],
        length: int,
        slots: int,
        limit: float,
    ) -> None:
        encoder, runner = pair
        capacity = max(1, slots // self.options.capacity_divisor)
        batch = batch_of(name, encoder.shape.vocab, length, slots, capacity, encoder.pad_id, self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        start = time.perf_counter()
        runner.embed(batch)
        settle(self.device)
        compile_s = time.perf_counter() - start
        cached_s = self._again(encoder, variant, batch) if variant.compiled else None
        ran = sustain(lambda: runner.embed(batch), self.options.seconds, self.device)
        tokens = batch.real_tokens * ran.calls / ran.elapsed_s
        tflops = tokens * encoder.flops_per_token(length) / 1e12
        peak = self._datasheet(precision)
        line = Measured(
            encoder=name,
            precision=precision,
            variant=variant.text,
            row_tokens=length,
            slots=slots,
            rows=batch.rows,
            tokens_per_s=tokens,
            rows_per_s=batch.rows * ran.calls / ran.elapsed_s,
            ceiling_tokens_per_s=limit,
            share_of_ceiling=tokens / limit,
            tflops=tflops,
            mfu_datasheet=None if peak is None else tflops / peak,
            peak_gib=torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else None,
            compile_s=compile_s,
            cached_compile_s=cached_s,
            sustained_s=ran.elapsed_s,
            batches=ran.calls,
            sm_mhz=ran.sm_mhz,
            watts=ran.watts,
        )
        self.measured.append(line)
        print(row(line), flush=True)
        if variant.text in self.options.profile:
            kernels = profile(lambda: runner.embed(batch), self.device)
            self.profiles.append({"variant": variant.text, "slots": slots, "row_tokens": length, "kernels": kernels})
            for kernel, ms, count in kernels:
                print(f"    {ms:9.3f} ms {count:5d} x {kernel[:110]}", flush=True)

    def _again(self, encoder: Esm2 | DnabertS, variant: Variant, batch: PackedBatch) -> float:
        """Seconds to the first result of a second encoder, whose graph is found in the compiler's cache on disk."""
        name: Name = "esm2" if isinstance(encoder, Esm2) else "dnabert_s"
        start = time.perf_counter()
        _, runner = build(name, encoder.shape, encoder.weights, encoder.precision, variant, self.device)
        runner.embed(batch)
        settle(self.device)
        return time.perf_counter() - start

    def _datasheet(self, precision: Resolved) -> float | None:
        if self.device.type != "cuda" or precision == "fp32":
            return None
        name = torch.cuda.get_device_name(self.device)
        for part, (wide, narrow) in DATASHEET.items():
            if part in name:
                return narrow if precision == "fp8" else wide
        return None

    def _skip(self, name: Name, precision: str, variant: str, length: int, slots: int, reason: str) -> None:
        what = {"encoder": name, "precision": precision, "variant": variant, "row_tokens": length, "slots": slots}
        self.skipped.append(what | {"reason": reason})
        print(f"not run {name} {precision} {variant} {length}/{slots}: {reason}", flush=True)

    def record(self) -> dict[str, Any]:
        """All of it, for the JSON file."""
        return {
            "schema_version": SCHEMA_VERSION,
            "command": shlex.join([Path(sys.executable).name, *sys.argv]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **surroundings(self.device),
            "esm2": self.options.esm2,
            "dnabert_s": self.options.dnabert_s,
            "capacity_divisor": self.options.capacity_divisor,
            "ceilings": self.ceilings,
            "cosines": self.cosines,
            "measured": [asdict(line) for line in self.measured],
            "not_run": self.skipped,
            "profiles": self.profiles,
        }


HEADER = (
    f"{'encoder':9} {'prec':5} {'variant':32} {'row':>4} {'slots':>6} {'tokens/s':>11} {'rows/s':>9} {'ceiling':>8} "
    f"{'TFLOP/s':>8} {'MFU':>6} {'GiB':>6} {'first s':>8} {'again s':>8} {'MHz':>5} {'W':>5}"
)


def row(m: Measured) -> str:
    """One line of the table."""

    def text(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    speed = f"{m.tokens_per_s:11,.0f} {m.rows_per_s:9,.0f} {m.share_of_ceiling:8.1%} {m.tflops:8.2f}"
    first = f"{m.compile_s:8.2f} {text(m.cached_compile_s, '.2f'):>8}"
    return (
        f"{m.encoder:9} {m.precision:5} {m.variant:32} {m.row_tokens:4} {m.slots:6} {speed} "
        f"{text(m.mfu_datasheet, '.1%'):>6} {text(m.peak_gib, '.2f'):>6} {first} "
        f"{text(m.sm_mhz, 'd'):>5} {text(m.watts, '.0f'):>5}"
    )


def surroundings(device: torch.device) -> dict[str, Any]:
    """What stands beside every figure."""
    triton = importlib.util.find_spec("triton")
    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0], "triton": None}
    if triton is not None:
        import triton as installed

        found["triton"] = installed.__version__
    if device.type != "cuda":
        return found | {"device": "CPU", "threads": torch.get_num_threads(), "driver": None}
    driver = None
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return found | {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "driver": driver}


def options_from(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--encoders", default="esm2,dnabert_s")
    parser.add_argument("--esm2", default=None, choices=list(ESM2_SIZES), help="t36_3B on CUDA, else tiny")
    parser.add_argument("--dnabert-s", default=None, choices=list(DNABERT_SIZES), help="base on CUDA, else tiny")
    parser.add_argument("--precisions", default=None, help="fp16,bf16,fp8 on CUDA, else fp32")
    parser.add_argument("--variants", default=None, help="for both encoders; see above")
    parser.add_argument("--lengths", default="52,102,168", help="tokens of a row of ESM-2")
    parser.add_argument("--dna-lengths", default="35", help="tokens of a row of DNABERT-S")
    parser.add_argument("--budgets", default="16384", help="token slots of a batch, e.g. 8192,16384,16896,32768,65536")
    parser.add_argument("--capacity-divisor", type=int, default=8, help="row capacity of a batch = slots / this")
    parser.add_argument("--seconds", type=float, default=5.0, help="each measurement lasts at least this long")
    parser.add_argument("--time-limit", type=float, default=480.0, help="seconds for the whole run; the rest is named")
    parser.add_argument("--profile", default="", help="variants whose kernels are listed, one batch each")
    parser.add_argument("--accuracy", action=argparse.BooleanOptionalAction, default=True, help="cosines against fp32")
    parser.add_argument("--json", type=Path, default=None, help="write everything here")
    options = parser.parse_args(arguments)
    cuda = options.device.startswith("cuda")
    options.esm2 = options.esm2 or ("t36_3B" if cuda else "tiny")
    options.dnabert_s = options.dnabert_s or ("base" if cuda else "tiny")
    options.encoders = list(_words(options.encoders))
    options.precisions = list(_words(options.precisions or ("fp16,bf16,fp8" if cuda else "fp32")))
    plain = {"esm2": ESM2_VARIANTS, "dnabert_s": DNABERT_VARIANTS} if cuda else dict.fromkeys(NAMES, CPU_VARIANTS)
    options.variants = {name: list(_words(options.variants or plain[name])) for name in NAMES}
    options.lengths = {"esm2": _numbers(options.lengths), "dnabert_s": _numbers(options.dna_lengths)}
    options.budgets = _numbers(options.budgets)
    options.profile = list(_words(options.profile))
    return options


def _words(text: str) -> Iterator[str]:
    return (word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


def main(arguments: list[str]) -> int:
    """Measure, print the table, write the JSON; 1 when nothing could be measured."""
    options = options_from(arguments)
    bench = Bench(options)
    print(json.dumps(surroundings(bench.device)))
    print(HEADER, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        bench.run()
    print(f"\n{HEADER}")
    for line in sorted(bench.measured, key=lambda m: (m.encoder, m.precision, m.slots, m.row_tokens, -m.tokens_per_s)):
        print(row(line))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(bench.record(), indent=1) + "\n", encoding="utf-8")
    return 0 if bench.measured else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
