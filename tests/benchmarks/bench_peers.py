"""How fast ESM-2 is here and in other packages: same device, same random weights, same rows, one run.

    python tests/benchmarks/bench_peers.py                    # ESM-2 3B on the GPU, some three minutes
    python tests/benchmarks/bench_peers.py --tiny             # two small layers on the CPU: a smoke test
    pip install --no-deps transformers einops esm-efficient faesm   # what is missing is named in the table

Rows are proteins of the frames of reads: of 150 bases, and of 50 to 300. What is timed is embedding, from tokens on the
device to the mean of each row; the original's method and v1.0's are timed as they are, tokens made and means fetched
row by row. Packages that ask for flash-attn get torch's own attention over rows of different lengths under that name.
Agreement is the centred cosine of mean embeddings to float32, worst and mean, so that nobody is fast by being wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import re
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from virnuc_core.baseline.batches import BATCHES
from virnuc_core.baseline.networks import PaddedEsm2, embed_rows, load_tensors
from virnuc_core.encoders.backends import BackendName
from virnuc_core.encoders.convert import random_tensor
from virnuc_core.encoders.layers import InputStatistics
from virnuc_core.encoders.model_config import ESM2_SIZES, PRODUCTS, Esm2Shape
from virnuc_core.encoders.models import TOKEN_DROPOUT_SCALE, Esm2
from virnuc_core.encoders.positions import rotary_frequencies
from virnuc_core.encoders.precision import Resolved
from virnuc_core.encoders.quantise import CalibrationRecorder
from virnuc_core.encoders.reference import segment_mean
from virnuc_core.encoders.tokenize import ESM2_PAD, Esm2Tokenizer, PackedBatch

LETTERS = np.frombuffer(b"LAGVSERTIDPKQNFYMHWC", np.uint8)
SETS = {"150 bases": (150, 150), "50 to 300 bases": (50, 300)}  # shortest and longest read
COMPARED = 256  # rows whose embeddings are held against float32
Batches = list[tuple[list[int], Any]]  # which rows, and what the network takes
Weights = Mapping[str, Tensor]


class Task(NamedTuple):
    """What all engines are given."""

    weights: Weights  # float32, by our names, on the device
    shape: Esm2Shape
    device: torch.device
    dtype: torch.dtype  # of the other packages' numbers
    slots: int  # tokens of a batch, padding included


class Engine(NamedTuple):
    """One engine with the weights in it."""

    batches: Callable[[list[bytes]], Batches]
    embed: Callable[[Any], Tensor]  # what a batch takes, to float32 [rows, width]
    slower: int = 1  # it gets so many times fewer rows


# ---- rows and batches


def proteins(bases: tuple[int, int], tokens: int) -> list[bytes]:
    """Random proteins of frames of reads, until their tokens, start and end included, are `tokens`."""
    random, rows = np.random.default_rng(bases), []
    while tokens > 0:
        length = (random.integers(bases[0], bases[1] + 1) - random.integers(3)) // 3
        rows.append(random.choice(LETTERS, length).tobytes())
        tokens -= length + 2
    return rows


def groups(rows: Sequence[int], cost: Callable[[list[int]], int], most: int) -> list[list[int]]:
    """Rows in order, a new group wherever the cost would be more than `most`."""
    row_groups: list[list[int]] = [[]]
    for row in rows:
        if row_groups[-1] and cost([*row_groups[-1], row]) > most:
            row_groups.append([])
        row_groups[-1].append(row)
    return row_groups


def packed(task: Task, rows: list[bytes], *, fixed: bool) -> Batches:
    """Rows end to end; with a fixed number of slots and rows, as our engine has it, or just what there is."""
    lengths = [len(row) + 2 for row in rows]
    batches: Batches = []
    for group in groups(
        range(len(rows)), lambda some: sum(lengths[row] for row in some), task.slots
    ):
        tokens, bounds = Esm2Tokenizer().encode([rows[row] for row in group])
        real, longest = len(tokens), max(lengths[row] for row in group)
        if fixed:
            tokens = F.pad(tokens, (0, task.slots - real), value=ESM2_PAD)
            bounds = F.pad(bounds, (0, task.slots // 8 - len(group)), value=real)
            longest = max(64, 1 << (longest - 1).bit_length())
        batch = PackedBatch(tokens, bounds.to(torch.int32), len(group), longest, real)
        batches.append((group, batch.to(task.device)))
    return batches


def padded(task: Task, rows: list[bytes]) -> Batches:
    """Rows by length, padded to the longest of a batch."""
    longest_first = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    batches: Batches = []
    for group in groups(
        longest_first, lambda some: len(some) * (len(rows[some[0]]) + 2), task.slots
    ):
        each = [Esm2Tokenizer().encode([rows[row]])[0] for row in group]
        tokens = nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=ESM2_PAD)
        batches.append((group, tokens.to(task.device)))
    return batches


def packed_means(x: Tensor, bounds: Tensor) -> Tensor:
    """Means of the residues of rows end to end."""
    return segment_mean(x, bounds[:-1] + 1, bounds[1:] - 1)


# ---- engines


def ours(task: Task, precision: Resolved, way: BackendName) -> Engine:
    """virnuc."""
    build = functools.partial(Esm2, task.shape, task.weights.__getitem__, task.device)
    recorder = None
    if precision == "int8":
        probe = build(precision="fp16" if way == "fused" else "fp32", attention="reference")
        probe.apply_linear = seen = CalibrationRecorder(probe)
        probe.embed(packed(task, proteins((50, 300), task.slots // 2), fixed=True)[0][1])
        tables = seen.tensors()
        layers = range(task.shape.layers)
        recorder = [
            {name: InputStatistics(*tables[f"layers.{i}.{name}"]) for name in PRODUCTS}
            for i in layers
        ]
        del probe, seen
    esm2 = build(precision=precision, attention=way, calibration=recorder)
    return Engine(
        lambda rows: packed(task, rows, fixed=True), lambda batch: esm2.embed(batch)[: batch.rows]
    )


def original(task: Task, dtype: torch.dtype, slower: int) -> Engine:
    """The method to beat, as virnuc's baseline has it: the original in float32, v1.0 in float16."""
    method = "vanilla" if dtype == torch.float32 else "v1"
    tensors = load_tensors(task.weights.__getitem__, task.shape.tensors(), task.device, dtype)
    network = PaddedEsm2(tensors, task.shape, Esm2Tokenizer())

    def batches(rows: list[bytes]) -> Batches:
        return [(list(range(len(rows))), rows)]

    def embed(rows: list[bytes]) -> Tensor:
        return embed_rows(network, rows, BATCHES[method, "esm2"]([len(row) for row in rows]))

    return Engine(batches, embed, slower)


def huggingface_names(task: Task) -> dict[str, Tensor]:
    """The layers' weights by the names they have in transformers."""
    names = {
        "attn_norm": "attention.LayerNorm",
        "out": "attention.output.dense",
        "ffn_norm": "LayerNorm",
    }
    names |= {"fc1": "intermediate.dense", "fc2": "output.dense"}
    found = {}
    for i in range(task.shape.layers):
        for kind in ("weight", "bias"):
            parts = task.weights[f"layers.{i}.qkv.{kind}"].chunk(3)
            for part, name in zip(parts, ("query", "key", "value"), strict=True):
                found[f"layer.{i}.attention.self.{name}.{kind}"] = part
            for ours_, theirs in names.items():
                found[f"layer.{i}.{theirs}.{kind}"] = task.weights[f"layers.{i}.{ours_}.{kind}"]
    return found | {
        f"emb_layer_norm_after.{kind}": task.weights[f"final_norm.{kind}"]
        for kind in ("weight", "bias")
    }


def filled(
    task: Task, build: Callable[[], nn.Module], state: Mapping[str, Tensor], free: str = "!"
) -> Any:
    """A network with this state, angles in float32; what begins with `free` is not asked for."""
    with torch.device(task.device):
        network = build().to(task.dtype).eval()
    missing, unknown = network.load_state_dict(dict(state), strict=False)
    wrong = [
        name
        for name in (*missing, *unknown)
        if "inv_freq" not in name and not name.startswith(free)
    ]
    assert not wrong, wrong
    for part in network.modules():
        for name in ("inv_freq", "original_inv_freq"):
            if isinstance(getattr(part, name, None), Tensor):
                setattr(part, name, rotary_frequencies(task.shape.head_dim).to(task.device))
    return network


def configuration(task: Task) -> Any:
    """The sizes as transformers has them."""
    from transformers import EsmConfig

    s = task.shape
    sizes: dict[str, Any] = {
        "vocab_size": s.vocab,
        "hidden_size": s.width,
        "num_hidden_layers": s.layers,
    }
    sizes |= {
        "num_attention_heads": s.heads,
        "intermediate_size": s.ffn_width,
        "layer_norm_eps": s.norm_eps,
    }
    sizes |= {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 1026,
    }
    sizes |= {"pad_token_id": ESM2_PAD, "mask_token_id": 32, "token_dropout": s.token_dropout}
    return EsmConfig(**sizes, position_embedding_type="rotary", emb_layer_norm_before=False)


def transformers(task: Task, *, compiled: bool) -> Engine:
    """EsmModel with torch's attention, rows sorted by length and padded."""
    from transformers import EsmModel

    config = configuration(task)
    config._attn_implementation = "sdpa"
    state = {f"encoder.{name}": tensor for name, tensor in huggingface_names(task).items()}
    state["embeddings.word_embeddings.weight"] = task.weights["embed.weight"]
    model = filled(task, lambda: EsmModel(config, add_pooling_layer=False), state, "contact_head")
    if compiled:
        for layer in model.encoder.layer:
            layer.compile()

    def embed(tokens: Tensor) -> Tensor:
        real = tokens != ESM2_PAD
        hidden_states = model(tokens, attention_mask=real).last_hidden_state
        residues = real.clone()  # residues: neither the start nor the end token
        residues[:, 0] = False
        residues[torch.arange(len(real), device=real.device), real.sum(1) - 1] = False
        return (hidden_states * residues[..., None]).sum(1, dtype=torch.float32) / residues.sum(
            1, keepdim=True
        )

    return Engine(lambda rows: padded(task, rows), embed)


def esm_efficient(task: Task) -> Engine:
    """esm-efficient's ESM2 over packed rows."""
    with flash_attention():
        from esme.esm import ESM2
    names = {"attn_norm": "self_attn.norm", "out": "self_attn.out", "ffn_norm": "final.0"}
    names |= {"fc1": "final.1", "fc2": "final.3"}
    # it leaves out the factor for tokens hidden in training: its own checkpoints have it in the table
    state = {"embed_tokens.weight": task.weights["embed.weight"] * TOKEN_DROPOUT_SCALE}
    for kind in ("weight", "bias"):
        state[f"emb_layer_norm_after.{kind}"] = task.weights[f"final_norm.{kind}"]
        for i in range(task.shape.layers):
            for part, name in zip(
                task.weights[f"layers.{i}.qkv.{kind}"].chunk(3), "qkv", strict=True
            ):
                state[f"layers.{i}.self_attn.{name}.{kind}"] = part
            for ours_, theirs in names.items():
                state[f"layers.{i}.{theirs}.{kind}"] = task.weights[f"layers.{i}.{ours_}.{kind}"]
    s = task.shape
    network = filled(
        task, lambda: ESM2(s.layers, s.width, s.heads, dtype=task.dtype), state, "lm_head"
    )

    def embed(batch: PackedBatch) -> Tensor:
        sequence_bounds = batch.cu_seqlens, batch.max_seqlen
        return packed_means(
            network.forward_representation(batch.tokens, pad_args=sequence_bounds), batch.cu_seqlens
        )

    return Engine(lambda rows: packed(task, rows, fixed=False), embed)


def faesm(task: Task) -> Engine:
    """FAESM's encoder over packed rows; its embedding, which pads and unpads, is left out in its favour."""
    import transformers.models.esm.modeling_esm as theirs
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    theirs.BaseModelOutputWithPastAndCrossAttentions = (
        BaseModelOutputWithPastAndCrossAttentions  # it looks there
    )
    with flash_attention():
        from faesm.esm import FAEsmEncoder
    config = configuration(task)
    config.use_fa = True
    encoder = filled(task, lambda: FAEsmEncoder(config), huggingface_names(task))
    table = (task.weights["embed.weight"] * TOKEN_DROPOUT_SCALE).to(task.dtype)

    def embed(batch: PackedBatch) -> Tensor:
        x = F.embedding(batch.tokens, table)
        hidden_states = encoder(
            x, cu_seqlens=batch.cu_seqlens, max_seqlen=batch.max_seqlen, return_dict=False
        )[0]
        return packed_means(hidden_states, batch.cu_seqlens)

    return Engine(lambda rows: packed(task, rows, fixed=False), embed)


# ---- what stands in for flash-attn


def attend(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float | None
) -> Tensor:
    """Attention within rows [tokens, heads, head_dim], by torch's own flash attention; row by row on a CPU."""
    if q.is_cuda:
        way = (bounds, bounds, longest, longest, 0.0, False, False)
        return torch.ops.aten._flash_attention_forward(q, k, v, *way, scale=scale)[0]
    spans = [slice(*ends) for ends in bounds.unfold(0, 2, 1).tolist()]
    rows = ([t[span].transpose(0, 1) for t in (q, k, v)] for span in spans)
    return torch.cat(
        [F.scaled_dot_product_attention(*row, scale=scale).transpose(0, 1) for row in rows]
    )


@functools.cache
def rotary_kernel() -> Any:
    """Rotation in place of one stretch of a row's positions and one head, as flash-attn's kernel does it."""
    import triton
    import triton.language as tl

    globals()["tl"] = tl  # where a kernel looks for its names

    @triton.jit
    def kernel(x, cos, sin, bounds, token_step, head_step, half: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        begin, end = tl.load(bounds + tl.program_id(0)), tl.load(bounds + tl.program_id(0) + 1)
        position = tl.program_id(1) * block + tl.arange(0, block)
        column, is_inside = tl.arange(0, half)[None, :], (begin + position < end)[:, None]
        place = (
            x
            + (begin + position).to(tl.int64)[:, None] * token_step
            + tl.program_id(2) * head_step
            + column
        )
        angle = position[:, None] * half + column
        c = tl.load(cos + angle, mask=is_inside, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=is_inside, other=0.0).to(tl.float32)
        low = tl.load(place, mask=is_inside, other=0.0).to(tl.float32)
        high = tl.load(place + half, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(place, (low * c - high * s).to(x.dtype.element_ty), mask=is_inside)
        tl.store(place + half, (high * c + low * s).to(x.dtype.element_ty), mask=is_inside)

    return kernel


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, *, cu_seqlens: Tensor, max_seqlen: int, **_: object
) -> Tensor:
    """Rotary positions on `x` [tokens, heads, head_dim], in place."""
    if x.is_cuda:
        grid = (len(cu_seqlens) - 1, -(-max_seqlen // 16), x.shape[1])
        rotary_kernel()[grid](
            x, cos, sin, cu_seqlens, x.stride(0), x.stride(1), half=x.shape[2] // 2, block=16
        )
        return x
    place = torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()])
    c, s = cos[place][:, None], sin[place][:, None]
    low, high = x.clone().chunk(2, -1)
    return x.copy_(torch.cat((low * c - high * s, high * c + low * s), -1))


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, *_: object, **more: Any
) -> Tensor:
    """flash_attn_varlen_func, of rows that attend to themselves."""
    return attend(q, k, v, cu_seqlens_q, more["max_seqlen_q"], more.get("softmax_scale"))


def varlen_packed(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float | None = None
) -> Tensor:
    """flash_attn_varlen_qkvpacked_func."""
    return attend(*qkv.unbind(1), cu_seqlens, max_seqlen, softmax_scale)


@contextlib.contextmanager
def flash_attention() -> Iterator[None]:
    """Where flash-attn is not installed: what other packages import from it, for as long as they are imported."""
    ask = torch.cuda.get_device_capability
    if importlib.util.find_spec("flash_attn") is None:
        functions = {
            "flash_attn_varlen_func": varlen,
            "flash_attn_varlen_qkvpacked_func": varlen_packed,
        }
        for part in (
            "",
            "bert_padding",
            "flash_attn_interface",
            "layers",
            "layers.rotary",
            "ops",
            "ops.triton",
        ):
            stand_in(f"flash_attn.{part}".rstrip("."), **functions)
        stand_in("flash_attn.ops.triton.rotary", apply_rotary=rotate)
    if importlib.util.find_spec("accelerate") is None:
        stand_in("accelerate")
    if not torch.cuda.is_available():
        torch.cuda.get_device_capability = lambda *_: (9, 0)  # FAESM asks when it is imported
    try:
        yield
    finally:
        torch.cuda.get_device_capability = ask


def stand_in(name: str, **functions: object) -> None:
    """Have `import name` give a module with these functions."""
    sys.modules[name] = module = Stand(name)
    module.__spec__ = importlib.util.spec_from_loader(name, None)
    vars(module).update(functions)


class Stand(types.ModuleType):
    """A module that has every name that is asked of it; what no engine here calls is `None`."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


# ---- the run


class Found(NamedTuple):
    """What was measured of one engine."""

    rates: dict[str, tuple[float, float]]  # by row set: median tokens/s and (most - least) / median
    agreement: tuple[float, float]


def settle(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def embeddings(engine: Engine, batches: Batches) -> Tensor:
    """Of the first rows, in order, as far as they are in these batches; NaN where they are not: [COMPARED, width]."""
    groups_ = [torch.tensor(group) for group, _ in batches]
    embedded = torch.cat([engine.embed(batch).float().cpu() for _, batch in batches])
    in_row_order = torch.full(
        (1 + max(COMPARED, int(torch.cat(groups_).max())), embedded.shape[1]), torch.nan
    )
    in_row_order[torch.cat(groups_)] = embedded
    return in_row_order[:COMPARED]


def agreement(got: Tensor, exact: Tensor) -> tuple[float, float]:
    """Centred cosine of embeddings to float32 ones: worst and mean."""
    both_computed = ~got.isnan().any(1) & ~exact.isnan().any(1)
    middle = exact[both_computed].double().mean(0)
    each = F.cosine_similarity(
        got[both_computed].double() - middle, exact[both_computed].double() - middle
    )
    return float(each.min()), float(each.mean())


def measure(
    engine: Engine,
    task: Task,
    exact: Mapping[str, Tensor],
    sets: Mapping[str, list[bytes]],
    repeats: int,
) -> Found:
    """One engine on all sets of rows."""
    rates, agreements = {}, []
    for name, rows in sets.items():
        batches = engine.batches(rows[: max(COMPARED, len(rows) // engine.slower)])
        batches = batches[: max(1, len(batches) - 1)]  # the last is not full
        tokens, found = sum(len(rows[row]) + 2 for group, _ in batches for row in group), []
        agreements.append(
            agreement(embeddings(engine, batches), exact[name])
        )  # and kernels of every size are compiled
        for _ in range(repeats):
            settle(task.device)
            started_s = time.perf_counter()
            for _, batch in batches:
                engine.embed(batch)
            settle(task.device)
            found.append(tokens / (time.perf_counter() - started_s))
        rates[name] = statistics.median(found), (max(found) - min(found)) / statistics.median(found)
    return Found(
        rates,
        (min(worst for worst, _ in agreements), statistics.mean(mean for _, mean in agreements)),
    )


def engines(task: Task) -> dict[str, Callable[[], Engine]]:
    """All of them by name, ours first: that is what the others are compared with."""
    gpu, kind = task.device.type == "cuda", "fp16" if task.device.type == "cuda" else "fp32"
    own: tuple[Resolved, ...] = ("fp16", "bf16", "int8") if gpu else ("fp32", "int8")
    way: BackendName = "fused" if gpu else "reference"
    engines_by_name: dict[str, Callable[[], Engine]] = {
        f"virnuc, {name}": functools.partial(ours, task, name, way) for name in own
    }
    return engines_by_name | {
        f"transformers, SDPA, {kind}": functools.partial(transformers, task, compiled=False),
        f"transformers, SDPA, compiled, {kind}": functools.partial(
            transformers, task, compiled=True
        ),
        f"esm-efficient, {kind}": functools.partial(esm_efficient, task),
        f"faesm, {kind}": functools.partial(faesm, task),
        f"v1.0's method, {kind}": functools.partial(original, task, task.dtype, 2 if gpu else 1),
        "the original's method, fp32": functools.partial(
            original, task, torch.float32, 8 if gpu else 1
        ),
    }


def table(found: Mapping[str, Found | str], sets: Sequence[str]) -> str:
    """A markdown table; speeds in thousands of real tokens a second, and how many times as fast ours is."""
    base = next((result for result in found.values() if isinstance(result, Found)), None)
    heads = [head for name in sets for head in (f"{name}, k tokens/s", "virnuc is")]
    lines = [
        f"| engine | {' | '.join(heads)} | agreement |",
        f"| --- {'| ---: ' * (len(heads) + 1)}|",
    ]
    for name, result in found.items():
        cells = [f"not run: {result}", *[""] * len(heads)] if isinstance(result, str) else []
        if isinstance(result, Found) and base is not None:
            for each in sets:
                rate, spread = result.rates[each]
                cells += [
                    f"{rate / 1e3:.1f} ± {50 * spread:.1f} %",
                    f"{base.rates[each][0] / rate:.2f}×",
                ]
            cells.append(f"{result.agreement[0]:.5f}; {result.agreement[1]:.5f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def versions() -> str:
    """Versions of what took part."""
    lines = []
    for name in ("torch", "triton", "transformers", "esm-efficient", "faesm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            lines.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="two small layers on the CPU")
    parser.add_argument("--tokens", type=int, default=115_000, help="of each set of rows")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--time-limit", type=float, default=190, help="seconds; an engine is not begun after them"
    )
    parser.add_argument(
        "--only", default="", help="engines whose names match this, beside our first"
    )
    parser.add_argument("--out", type=Path, help="write the table here too")
    options = parser.parse_args(arguments)
    if not (options.tiny or torch.cuda.is_available()):
        parser.error("there is no GPU that torch can use; --tiny runs on the CPU")
    began = time.perf_counter()
    tiny = {"layers": 2, "width": 64, "heads": 2, "ffn_width": 256}
    shape = Esm2Shape(**tiny) if options.tiny else ESM2_SIZES["t36_3B"]
    device = torch.device("cpu" if options.tiny else "cuda:0")
    weights = {name: random_tensor(shape, name).to(device) for name in shape.tensors()}
    dtype = torch.float32 if options.tiny else torch.float16
    task = Task(weights, shape, device, dtype, 1_024 if options.tiny else 16_384)
    sets = {
        name: proteins(bases, 3_000 if options.tiny else options.tokens)
        for name, bases in SETS.items()
    }
    results: dict[str, Found | str] = {}
    with torch.inference_mode():
        plain = ours(task, "fp32", "reference")
        exact = {
            name: embeddings(plain, plain.batches(rows[:COMPARED])) for name, rows in sets.items()
        }
        del plain
        for number, (name, build) in enumerate(engines(task).items()):
            if number and not re.search(options.only, name):
                continue
            gc.collect()
            try:
                late = time.perf_counter() - began > options.time_limit
                results[name] = (
                    "no time left" if late else measure(build(), task, exact, sets, options.repeats)
                )
            except Exception as error:  # noqa: BLE001 - another's package: whatever it is, the rest is measured
                results[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            print(
                f"{time.perf_counter() - began:6.1f} s  {name}: {results[name]}",
                file=sys.stderr,
                flush=True,
            )
    hardware = "CPU" if options.tiny else torch.cuda.get_device_name(device)
    description = (
        f"{datetime.now(UTC):%Y-%m-%d}, {hardware}, Python {sys.version.split()[0]}, {versions()}"
    )
    text = f"{description}; {shape.layers} layers of {shape.width}, {options.repeats} repeats\n\n{table(results, list(SETS))}\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
