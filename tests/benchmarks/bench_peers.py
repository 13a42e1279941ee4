"""How fast ESM-2 is here and in other packages: same device, same random weights, same rows, one run.

    python tests/benchmarks/bench_peers.py                    # ESM-2 3B on the GPU, up to nine minutes
    python tests/benchmarks/bench_peers.py --only "virnuc|torch"   # only the strong peer
    python tests/benchmarks/bench_peers.py --tiny             # two small layers on the CPU: a smoke test
    pip install --no-deps transformers einops esm-efficient faesm   # what is missing is named in the table

Rows are proteins of the frames of reads: of 150 bases, and of 50 to 300. What is timed is embedding, from tokens on the
device to the mean of each row; the original's method and v1.0's are timed as they are, tokens made and means fetched
row by row. Packages that ask for flash-attn get torch's own attention over rows of different lengths under that name.
Agreement is the centred cosine of mean embeddings to float32, worst and mean, so that nobody is fast by being wrong.

The strong peer ("torch, packed, ...") is the fastest encoder that can be written with torch alone: rows end to end in
batches of a fixed size, torch's attention for rows of different lengths, and torch.compile with max-autotune for the
two functions between. It gets our batches. CUDA graphs are left out: a batch keeps the GPU busy for 0.16 s, so that
launching costs nothing.

A rate is the median of the repeats. Before or after each repeat, ours runs in the same process. A lead is the median
of the ratios of neighbouring runs, so that the clock of the card, which falls with its temperature, is the same for
both. The GPU needs 60 GB of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import re
import signal
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
OWN, STRONG = "virnuc, ", "torch, packed, varlen, compiled, "  # how their names begin
FORMATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
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
    note: str = ""  # what a reader of its row should know


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


# ---- the strong peer: torch alone


class CompileTimeout(BaseException):
    """Compilation took longer than it may.

    It is no `Exception`, because the compiler goes on after many of those.
    """


@contextlib.contextmanager
def compile_limit(seconds: float) -> Iterator[None]:
    """Raise `CompileTimeout` in the main thread if the block takes longer than this."""

    def stop(*_: object) -> None:
        raise CompileTimeout

    previous_handler = signal.signal(signal.SIGALRM, stop)
    # Every 5 s again, in case that a callback swallows the first one.
    signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds), 5.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)


class TorchBatch(NamedTuple):
    """A packed batch as the strong peer takes it. Its number of slots is always the same."""

    tokens: Tensor  # [slots]
    bounds: Tensor  # int32 [rows + 1]: first slot of each row, then the end
    longest: int
    cos: Tensor  # float32 [slots, 1, head_dim / 2]
    sin: Tensor


class TorchLayer(NamedTuple):
    """The weights of one transformer layer."""

    attn_norm: tuple[Tensor, Tensor]  # weight and bias
    qkv: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    ffn_norm: tuple[Tensor, Tensor]
    fc1: tuple[Tensor, Tensor]
    fc2: tuple[Tensor, Tensor]


class TorchEncoder:
    """ESM-2 written with torch alone, over packed rows.

    Only attention works across tokens. What lies before and behind it is compiled.
    """

    def __init__(self, task: Task, dtype: torch.dtype) -> None:
        def affine(name: str) -> tuple[Tensor, Tensor]:
            return task.weights[f"{name}.weight"].to(dtype), task.weights[f"{name}.bias"].to(dtype)

        self.task = task
        self.shape = task.shape
        self.layers = []
        for i in range(task.shape.layers):
            parts = [affine(f"layers.{i}.{name}") for name in TorchLayer._fields]
            self.layers.append(TorchLayer(*parts))
        self.final_norm = affine("final_norm")
        self.table = (task.weights["embed.weight"] * TOKEN_DROPOUT_SCALE).to(dtype)
        self.before_attention: Callable[..., tuple[Tensor, Tensor, Tensor]] = self._qkv
        self.behind_attention: Callable[..., Tensor] = self._add_rest

    def compile(self, mode: str) -> None:
        """Have both functions compiled at their next call, for fixed sizes.

        Args:
            mode: A mode of torch.compile, or "eager" to trace them without generating code.
        """
        torch._dynamo.reset()
        settings: dict[str, Any] = {"backend": "eager"} if mode == "eager" else {"mode": mode}
        compiled = functools.partial(torch.compile, dynamic=False, fullgraph=True, **settings)
        self.before_attention = compiled(self._qkv)
        self.behind_attention = compiled(self._add_rest)

    def prepare(self, batch: PackedBatch) -> TorchBatch:
        """Look up the angles of each token's place in its row, and leave out rows without tokens."""
        bounds = batch.cu_seqlens[: batch.rows + 1].contiguous()
        lengths = bounds.diff().tolist()
        place = torch.zeros(len(batch.tokens), dtype=torch.long)
        place[: sum(lengths)] = torch.cat([torch.arange(length) for length in lengths])
        frequencies = rotary_frequencies(self.shape.head_dim)
        angles = torch.outer(place.float(), frequencies)[:, None].to(self.task.device)
        return TorchBatch(batch.tokens, bounds, max(lengths), angles.cos(), angles.sin())

    def embed(self, batch: TorchBatch) -> Tensor:
        """Return the mean embedding of each row, float32 [rows, width]."""
        x = F.embedding(batch.tokens, self.table)
        for layer in self.layers:
            q, k, v = self.before_attention(x, layer.attn_norm, layer.qkv, batch.cos, batch.sin)
            values = varlen_attention(q, k, v, batch.bounds, batch.longest).flatten(1)
            x = self.behind_attention(x, values, layer.out, layer.ffn_norm, layer.fc1, layer.fc2)
        x = F.layer_norm(x, (self.shape.width,), *self.final_norm, self.shape.norm_eps)
        return packed_means(x, batch.bounds)

    def _qkv(
        self,
        x: Tensor,
        norm: tuple[Tensor, Tensor],
        qkv: tuple[Tensor, Tensor],
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries and keys, rotated, and the values: [slots, heads, head_dim] each."""
        normed = F.layer_norm(x, (self.shape.width,), *norm, self.shape.norm_eps)
        heads = F.linear(normed, *qkv).view(len(x), 3, self.shape.heads, self.shape.head_dim)
        q, k, v = heads.unbind(1)
        return rotated_halves(q, cos, sin), rotated_halves(k, cos, sin), v

    def _add_rest(
        self,
        x: Tensor,
        values: Tensor,
        out: tuple[Tensor, Tensor],
        norm: tuple[Tensor, Tensor],
        fc1: tuple[Tensor, Tensor],
        fc2: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Add the output of attention and of the feed-forward part to the residual stream."""
        x = x + F.linear(values, *out)
        normed = F.layer_norm(x, (self.shape.width,), *norm, self.shape.norm_eps)
        return x + F.linear(F.gelu(F.linear(normed, *fc1)), *fc2)


def rotated_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` [tokens, heads, head_dim] with rotary positions, computed in float32."""
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
    """Attention within rows by torch's function for rows of different lengths; row by row on a CPU."""
    if not q.is_cuda:
        attended = attend(q, k, v, bounds, longest, None)
        return F.pad(attended, (0, 0, 0, 0, 0, len(q) - len(attended)))  # the slots behind
    from torch.nn.attention.varlen import varlen_attn

    result = varlen_attn(q, k, v, bounds, bounds, longest, longest)
    assert isinstance(result, Tensor)
    return result


def strong_peer(task: Task, dtype: torch.dtype, mode: str, limit_s: Callable[[], float]) -> Engine:
    """The fastest encoder in torch alone, compiled.

    Args:
        task: What all engines are given.
        dtype: Its format.
        mode: A mode of torch.compile.
        limit_s: Returns the seconds that compilation may take. After them, torch's default mode
            is taken, and the table says so.
    """
    encoder = TorchEncoder(task, dtype)
    [_, probe], *_ = packed(task, proteins((150, 150), task.slots // 2), fixed=True)
    batch = encoder.prepare(probe)
    note = ""
    seconds = limit_s()
    for each_mode in (mode, "default"):
        encoder.compile(each_mode)
        started_s = time.perf_counter()
        try:
            with compile_limit(seconds):
                encoder.embed(batch)
                settle(task.device)
        except CompileTimeout:
            note += f"mode {each_mode} took longer than {seconds:.0f} s to compile; "
            if each_mode == "default":
                raise TimeoutError(note.removesuffix("; ")) from None
            seconds = max(60.0, limit_s())
        else:
            note += f"compiled in mode {each_mode} in {time.perf_counter() - started_s:.0f} s"
            break

    def batches(rows: list[bytes]) -> Batches:
        return [(group, encoder.prepare(each)) for group, each in packed(task, rows, fixed=True)]

    return Engine(batches, encoder.embed, note=note)


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


class Lead(NamedTuple):
    """How many times as fast one engine of ours is as another engine, over the repeats."""

    median: float
    lowest: float
    highest: float


class Found(NamedTuple):
    """What was measured of one engine."""

    rates: dict[str, tuple[float, float]]  # by row set: median tokens/s and (most - least) / median
    agreement: tuple[float, float]
    leads: dict[str, dict[str, Lead]]  # by row set and name of our engine
    note: str = ""


class Load(NamedTuple):
    """An engine with the batches of one set of rows."""

    engine: Engine
    batches: Batches
    tokens: int

    def rate(self, device: torch.device) -> float:
        """Embed all batches, and return the real tokens of a second."""
        settle(device)
        started_s = time.perf_counter()
        for _, batch in self.batches:
            self.engine.embed(batch)
        settle(device)
        return self.tokens / (time.perf_counter() - started_s)


def load_of(engine: Engine, rows: list[bytes]) -> Load:
    """Make the batches of an engine. The last one is left out, because it is not full."""
    batches = engine.batches(rows[: max(COMPARED, len(rows) // engine.slower)])
    batches = batches[: max(1, len(batches) - 1)]
    tokens = sum(len(rows[row]) + 2 for group, _ in batches for row in group)
    return Load(engine, batches, tokens)


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
    rivals: Mapping[str, Engine],
) -> Found:
    """Measure one engine on all sets of rows, taking turns with engines of ours.

    Args:
        engine: The engine.
        task: What all engines are given.
        exact: The embeddings in float32, by set of rows.
        sets: The rows.
        repeats: How many times each engine runs.
        rivals: Engines of ours by name, which have run before.
    """
    rates: dict[str, tuple[float, float]] = {}
    leads: dict[str, dict[str, Lead]] = {}
    agreements = []
    for name, rows in sets.items():
        load = load_of(engine, rows)
        # this also compiles kernels of every size
        agreements.append(agreement(embeddings(engine, load.batches), exact[name]))
        rival_loads = {rival: load_of(each, rows) for rival, each in rivals.items()}
        rival_rates: dict[str, list[float]] = {rival: [] for rival in rivals}
        own_rates = []
        for repeat in range(repeats):
            order: list[str | None] = [None, *rivals]  # None: the engine itself
            if repeat % 2:
                order.reverse()
            for rival in order:
                if rival is None:
                    own_rates.append(load.rate(task.device))
                else:
                    rival_rates[rival].append(rival_loads[rival].rate(task.device))
        middle = statistics.median(own_rates)
        rates[name] = middle, (max(own_rates) - min(own_rates)) / middle
        leads[name] = {rival: lead(found, own_rates) for rival, found in rival_rates.items()}
    worst = min(worst for worst, _ in agreements)
    mean = statistics.mean(mean for _, mean in agreements)
    return Found(rates, (worst, mean), leads, engine.note)


def lead(rival_rates: Sequence[float], rates: Sequence[float]) -> Lead:
    """Return how many times as fast a rival is, repeat by repeat."""
    ratios = [rival / rate for rival, rate in zip(rival_rates, rates, strict=True)]
    return Lead(statistics.median(ratios), min(ratios), max(ratios))


def engines(task: Task, mode: str, limit_s: Callable[[], float]) -> dict[str, Callable[[], Engine]]:
    """All of them by name, ours first: that is what the others are compared with.

    Args:
        task: What all engines are given.
        mode: The mode of torch.compile for the strong peer.
        limit_s: Returns the seconds that its compilation may take.
    """
    gpu, kind = task.device.type == "cuda", "fp16" if task.device.type == "cuda" else "fp32"
    own: tuple[Resolved, ...] = ("fp16", "bf16", "int8") if gpu else ("fp32", "int8")
    way: BackendName = "fused" if gpu else "reference"
    engines_by_name: dict[str, Callable[[], Engine]] = {
        f"{OWN}{name}": functools.partial(ours, task, name, way) for name in own
    }
    peer_formats = ("fp16", "bf16") if gpu else ("fp32",)
    for name in peer_formats:
        engines_by_name[f"{STRONG}{name}"] = functools.partial(
            strong_peer, task, FORMATS[name], mode, limit_s
        )
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
    base = next((name for name, result in found.items() if isinstance(result, Found)), "")
    heads = [head for name in sets for head in (f"{name}, k tokens/s", f"{base} is")]
    lines = [
        f"| engine | {' | '.join(heads)} | agreement |",
        f"| --- {'| ---: ' * (len(heads) + 1)}|",
    ]
    for name, result in found.items():
        cells = [f"not run: {result}", *[""] * len(heads)] if isinstance(result, str) else []
        if isinstance(result, Found):
            for each in sets:
                rate, spread = result.rates[each]
                lead_of_base = result.leads[each].get(base)
                cells.append(f"{rate / 1e3:.1f} ± {50 * spread:.1f} %")
                cells.append("1.00×" if lead_of_base is None else f"{lead_of_base.median:.2f}×")
            cells.append(f"{result.agreement[0]:.5f}; {result.agreement[1]:.5f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def leads_table(found: Mapping[str, Found | str], sets: Sequence[str]) -> str:
    """A markdown table of the leads over the strong peers; "" if none was measured."""
    lines = []
    for name, result in found.items():
        if not (isinstance(result, Found) and name.startswith(STRONG)):
            continue
        for rival in result.leads[sets[0]]:
            cells = []
            for each in sets:
                middle, lowest, highest = result.leads[each][rival]
                cells.append(f"{middle:.3f}× ({lowest:.3f} to {highest:.3f})")
            lines.append(f"| {rival} | {name} | {' | '.join(cells)} |")
    if not lines:
        return ""
    head = f"| ours | over | {' | '.join(sets)} |\n| --- | --- {'| ---: ' * len(sets)}|"
    return "\n".join([head, *lines])


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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--time-limit", type=float, default=480, help="seconds; an engine is not begun after them"
    )
    parser.add_argument(
        "--compile-mode",
        help="torch.compile's mode for the strong peer (max-autotune-no-cudagraphs; with --tiny "
        "default), or eager: no code is generated",
    )
    parser.add_argument(
        "--compile-limit",
        type=float,
        default=150,
        help="seconds for compiling the strong peer in one format; after them its mode is default",
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
    mode = options.compile_mode or ("default" if options.tiny else "max-autotune-no-cudagraphs")

    def compile_limit_s() -> float:
        """Return the seconds that are left for compilation."""
        left_s = options.time_limit - (time.perf_counter() - began)
        return min(options.compile_limit, left_s)

    hardware = "CPU" if options.tiny else torch.cuda.get_device_name(device)
    description = (
        f"{datetime.now(UTC):%Y-%m-%d}, {hardware}, Python {sys.version.split()[0]}, {versions()}; "
        f"{shape.layers} layers of {shape.width}, {options.repeats} repeats"
    )
    results: dict[str, Found | str] = {}
    own_engines: dict[str, Engine] = {}  # they stay on the device
    with torch.inference_mode():
        plain = ours(task, "fp32", "reference")
        exact = {
            name: embeddings(plain, plain.batches(rows[:COMPARED])) for name, rows in sets.items()
        }
        del plain
        for number, (name, build) in enumerate(engines(task, mode, compile_limit_s).items()):
            if number and not re.search(options.only, name):
                continue
            gc.collect()
            try:
                if time.perf_counter() - began > options.time_limit:
                    results[name] = "no time left"
                else:
                    results[name] = take_turns(
                        name, build, own_engines, task, exact, sets, options.repeats
                    )
            except Exception as error:  # noqa: BLE001 - another's package: whatever it is, the rest is measured
                results[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            print(
                f"{time.perf_counter() - began:6.1f} s  {name}: {results[name]}",
                file=sys.stderr,
                flush=True,
            )
            if options.out:  # so that a run that is ended early leaves what it has measured
                options.out.write_text(page(description, results), encoding="utf-8")
    print(page(description, results))
    return 0


def take_turns(
    name: str,
    build: Callable[[], Engine],
    own_engines: dict[str, Engine],
    task: Task,
    exact: Mapping[str, Tensor],
    sets: Mapping[str, list[bytes]],
    repeats: int,
) -> Found:
    """Build an engine and measure it in turns with ours. An engine of ours is kept for the others.

    The strong peer takes turns with all engines of ours, the others with the first one.
    """
    rivals = dict(own_engines)
    if not name.startswith(STRONG):
        rivals = dict(list(own_engines.items())[:1])
    engine = build()
    result = measure(engine, task, exact, sets, repeats, rivals)
    if name.startswith(OWN):
        own_engines[name] = engine
    return result


def page(description: str, results: Mapping[str, Found | str]) -> str:
    """What is printed: the machine, the table, the leads, and notes."""
    parts = [description, table(results, list(SETS)), leads_table(results, list(SETS))]
    parts += [
        f"{name}: {result.note}."
        for name, result in results.items()
        if isinstance(result, Found) and result.note
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
