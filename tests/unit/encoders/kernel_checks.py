"""Each Triton kernel beside plain torch: run on a GPU by test_gpu.py, and by Triton's interpreter in test_kernels.py.

TRITON_INTERPRET=1 python tests/unit/encoders/kernel_checks.py [float16] [float32] [bfloat16]
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.encoders import kernels
from virnuc_core.encoders.attention_kernels import fused_attention
from virnuc_core.encoders.convert import random_tensor
from virnuc_core.encoders.layers import Calibration, InputStatistics, LinearLayer, apply_linear
from virnuc_core.encoders.model_config import PRODUCTS, DnabertShape, Esm2Shape
from virnuc_core.encoders.models import DnabertS, Esm2
from virnuc_core.encoders.positions import (
    RowLayout,
    alibi_slopes,
    rotary_frequencies,
    rotary_tables,
)
from virnuc_core.encoders.precision import Resolved, hadamard_rotation, quantise_rows, rotated
from virnuc_core.encoders.quantise import CalibrationRecorder
from virnuc_core.encoders.reference import reference_attention, segment_mean
from virnuc_core.encoders.tokenize import PackedBatch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# of results of size 1: one rounding to the type, and the order of a sum
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        got.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


class AttentionCase(NamedTuple):
    """Attention to compute, and the result expected in the live slots."""

    qkv: Tensor
    rows: RowLayout
    expected: Tensor


def bounds(device: torch.device, lengths: tuple[int, ...]) -> Tensor:
    """`cu_seqlens` of rows of these lengths, with three empty rows behind them."""
    ends = torch.tensor(lengths).cumsum(0)
    return torch.cat((torch.zeros(1), ends, ends[-1:].expand(3))).to(device, torch.int32)


def attention_case(
    rotary: bool,
    device: torch.device,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    heads: int = 2,
    head_dim: int = 32,
) -> AttentionCase:
    """Random rows of the given lengths, NaN in 70 dead slots; and what `reference` makes of them."""
    torch.manual_seed(1)
    live = sum(lengths)
    qkv = torch.randn(live + 70, 3 * heads * head_dim).to(device, dtype)
    qkv[live:] = torch.nan
    cu = bounds(device, lengths)
    cos, sin = rotary_tables(rotary_frequencies(head_dim).to(device), 512)
    rows = RowLayout(cu, len(cu) - 1, max(lengths), heads)
    if rotary:
        rows = rows._replace(cos=cos, sin=sin)
    else:
        rows = rows._replace(slopes=torch.tensor(alibi_slopes(heads), device=device))
    return AttentionCase(qkv, rows, reference_attention(qkv, rows))


def check_attention(
    rotary: bool, device: torch.device, dtype: torch.dtype, heads: int = 2, head_dim: int = 32
) -> None:
    """Rows of every kind of length, each kind under its own bound; dead slots come out as zeros."""
    length_sets = ((1, 52, 0, 64, 2), (102, 1, 128, 0), (130, 0, 193, 256, 192, 3), (300, 20, 257))
    blockwise = (
        (33, 1, 0, 70),
    )  # float32 goes by blocks of 32 whatever the length, and the interpreter is slow
    for lengths in blockwise if INTERPRETED and dtype == torch.float32 else length_sets:
        case = attention_case(rotary, device, dtype, lengths, heads, head_dim)
        got = fused_attention(case.qkv, case.rows)
        close(got[: sum(lengths)], case.expected[: sum(lengths)], dtype)
        assert torch.equal(got[sum(lengths) :], torch.zeros_like(got[sum(lengths) :]))


def check_attention_bound(device: torch.device, dtype: torch.dtype) -> None:
    """Neighbours, and the bound below its power of two, change no bit of a row's attention."""
    cases = list(itertools.product((True, False), (100, 150, 250, 400)))
    if INTERPRETED:  # which is slow
        cases = [(True, 100), (False, 260)]
    for rotary, length in cases:
        case = attention_case(rotary, device, dtype, (length,), heads=1)
        result_alone = fused_attention(case.qkv, case.rows._replace(rows=1))[:length]
        power_of_two = 1 << (length - 1).bit_length()
        start = power_of_two + 3  # behind two other rows
        other_values = case.qkv.new_zeros(start, case.qkv.shape[1]).normal_()
        bounds = [0, power_of_two, start, start + length]
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
        layout = case.rows._replace(cu_seqlens=cu_seqlens, rows=3, max_seqlen=power_of_two)
        in_company = fused_attention(torch.cat((other_values, case.qkv)), layout)
        assert torch.equal(result_alone, in_company[start : start + length]), (rotary, length)


def check_norm(device: torch.device, dtype: torch.dtype) -> None:
    """Layer norm alone, and with biases left out of the stream."""
    torch.manual_seed(4)
    width, eps = 160, 1e-5
    x = torch.randn(9, width).to(device, dtype)
    shift = torch.randn(width).to(device)
    weight, bias = torch.randn(width).to(device, dtype), torch.randn(width).to(device, dtype)

    def expected(wide_x: Tensor) -> Tensor:
        return F.layer_norm(wide_x, (width,), weight.float(), bias.float(), eps)

    close(kernels.norm(x, (weight, bias), eps), expected(x.float()), dtype)
    close(kernels.norm(x, (weight, bias), eps, shift), expected(x.float() + shift), dtype)


def check_int8(device: torch.device, dtype: torch.dtype) -> None:
    """All that writes or takes int8, beside the same by plain torch; sizes that do and do not fill the blocks."""
    torch.manual_seed(6)
    x = 3 * torch.randn(7, 192).to(device, dtype)
    x[0, :2], x[1] = (
        torch.tensor([-60_000, 60_000]),
        torch.linspace(-9, 9, 192),
    )  # as far as fp16 goes; GELU's tails
    affine = torch.randn(192).to(device, dtype), torch.randn(192).to(device, dtype)
    normalised = F.layer_norm(x.float(), (192,), affine[0].float(), affine[1].float(), 1e-5)
    turning = hadamard_rotation(192, device)
    for (rows, scale), plain in (
        (kernels.int8_rows(x, turning, norm=affine, eps=1e-5), normalised),
        (kernels.int8_rows(x, turning), x),
        (kernels.int8_rows(x, turning, gelu=True), F.gelu(x.float())),
    ):
        expected_rows, expected_scale = quantise_rows(rotated(plain.half().float()))
        torch.testing.assert_close(scale, expected_scale, rtol=1e-3, atol=0)
        differences = (rows.int() - expected_rows.int()).abs()
        assert rows.dtype == torch.int8
        assert differences.max() <= 1  # a value on the edge of two steps may fall to either side
        assert (differences > 0).float().mean() < 0.02
    check_lost_numbers(device, turning, affine)
    for m, n, k in ((130, 320, 144), (3, 64, 320)):
        inputs = torch.randn(m, k).to(device)
        weight, scale = quantise_rows(rotated(torch.randn(n, k, device=device) / k**0.5))
        layer = LinearLayer(weight, torch.randn(n, device=device), scale.squeeze(1))
        quantised_rows, expected = (
            quantise_rows(rotated(inputs.half().float())),
            apply_linear(inputs, layer),
        )
        close(kernels.int8_product(*quantised_rows, layer), expected, dtype)
        stream = torch.randn(m, n).to(device, dtype)
        sums = stream.float() + expected
        got = kernels.int8_product(*quantised_rows, layer, stream)
        assert got is stream
        close(got, sums, dtype)


def check_lost_numbers(
    device: torch.device, turning: Tensor, affine: tuple[Tensor, Tensor]
) -> None:
    """Hold that a row with NaN or infinity gets a scale that is no number, and its neighbours not."""
    width = len(affine[0])
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(3, width, device=device, dtype=affine[0].dtype)
        x[1, 70] = bad
        for preparation in ({"norm": affine, "eps": 1e-5}, {}, {"gelu": True}):
            if "gelu" in preparation and bad == -torch.inf:
                continue  # GELU of minus infinity is 0 or NaN, and both are right
            _rows, scale = kernels.int8_rows(x, turning, **preparation)
            assert scale.isfinite().flatten().tolist() == [True, False, True], (bad, preparation)


def check_gated_unit(device: torch.device, dtype: torch.dtype) -> None:
    """DNABERT-S's gated unit; sizes that do and do not fill the blocks."""
    torch.manual_seed(7)
    for m, n, k in ((200, 256, 64), (130, 128, 200)):
        x = torch.randn(m, k).to(device, dtype)
        weight = torch.randn(2 * n, k).to(device, dtype) / 8
        activation, gate = (x.float() @ weight.float().T).split(n, dim=1)
        unit = kernels.gated_unit(x, kernels.interleave(weight))
        close(unit, F.gelu(activation) * gate, dtype)


def check_span_means(device: torch.device, dtype: torch.dtype) -> None:
    """Means of spans, empty ones included; a span alone has the same mean bit for bit."""
    torch.manual_seed(10)
    x = torch.randn(150, 300).to(device, dtype)
    starts, ends = (
        torch.tensor(spans, device=device, dtype=torch.int32)
        for spans in ((0, 3, 40, 40), (3, 40, 40, 131))
    )
    got = kernels.span_means(x, starts, ends)
    torch.testing.assert_close(got, segment_mean(x, starts, ends), atol=1e-6, rtol=1e-6)
    means_alone = kernels.span_means(
        x[40:131].clone(), starts.new_tensor([0]), starts.new_tensor([91])
    )
    assert torch.equal(means_alone[0], got[3])


def input_statistics(esm2: Esm2, batch: PackedBatch) -> Calibration:
    """Record what the linear layers of an ESM-2 by plain torch are given for a batch."""
    recorder = CalibrationRecorder(esm2)
    esm2.apply_linear = recorder
    esm2.embed(batch)
    tensors = recorder.tensors()
    layers = []
    for i in range(len(esm2.layers)):
        statistics = {}
        for name in PRODUCTS:
            largest, mean = tensors[f"layers.{i}.{name}"]
            statistics[name] = InputStatistics(largest, mean)
        layers.append(statistics)
    return layers


def check_stack(device: torch.device, dtype: torch.dtype) -> None:
    """All layers of small encoders through the kernels; in half precision with sums and gated units inside products."""
    precision: Resolved = "fp32" if dtype == torch.float32 else "fp16"
    lengths = (1, 12, 0, 2) if INTERPRETED else (1, 20, 0, 67, 2)
    tokens = torch.randint(
        5, 24, (sum(lengths) + 9,), generator=torch.Generator().manual_seed(8)
    ).to(device)
    batch = PackedBatch(
        tokens, bounds(device, lengths), len(lengths), max(lengths) + 3, sum(lengths)
    )
    shape = Esm2Shape(layers=2, width=64, heads=2, ffn_width=256)
    dna = DnabertShape(layers=2, width=64, heads=2, ffn_width=128, vocab=32)

    def embedded(kind: Resolved, **way: Any) -> tuple[Tensor, Tensor]:
        esm2 = Esm2(shape, functools.partial(random_tensor, shape), device, precision=kind, **way)
        dnabert = DnabertS(
            dna, functools.partial(random_tensor, dna), device, precision=kind, **way
        )
        return esm2.embed(batch), dnabert.embed(batch)

    plain = embedded("fp32", attention="reference")
    for got, expected in zip(embedded(precision, attention="fused"), plain, strict=True):
        torch.testing.assert_close(
            got, expected, atol=1e-5 if precision == "fp32" else 1e-2, rtol=0
        )
    if precision == "fp16":
        reading: Any = functools.partial(random_tensor, shape)
        calibration = input_statistics(
            Esm2(shape, reading, device, precision="fp32", attention="reference"), batch
        )
        way: Any = {"precision": "int8", "calibration": calibration}
        got, expected = (
            Esm2(shape, reading, device, attention=attention, **way).embed(batch)
            for attention in ("fused", "reference")
        )
        torch.testing.assert_close(
            got, expected, atol=2e-2, rtol=0
        )  # fp16 on the way: some fall to the other side
        assert (got - plain[0]).abs().max() < 0.1


CHECKS: dict[str, tuple[Callable[[torch.device, torch.dtype], None], tuple[torch.dtype, ...]]] = {
    "rotary_attention": (
        functools.partial(check_attention, True),
        (torch.float32, torch.float16, torch.bfloat16),
    ),
    "alibi_attention": (
        functools.partial(check_attention, False),
        (torch.float32, torch.float16, torch.bfloat16),
    ),
    "attention_bound": (check_attention_bound, (torch.float16, torch.bfloat16)),
    "norm": (check_norm, (torch.float32, torch.float16, torch.bfloat16)),
    "int8": (check_int8, (torch.float16,)),
    "gated_unit": (check_gated_unit, (torch.float16, torch.bfloat16)),
    "span_means": (check_span_means, (torch.float32, torch.float16)),
    "stack": (check_stack, (torch.float32, torch.float16)),
}


if __name__ == "__main__":
    for name, (check, dtypes) in CHECKS.items():
        for one in dtypes:
            if str(one).removeprefix("torch.") not in (sys.argv[1:] or ("float16", "float32")):
                continue  # bfloat16 is nothing new, and the interpreter is slow
            check(torch.device("cpu"), one)
            print(f"{name} {one} ok", flush=True)
