"""Each Triton kernel beside plain torch: run on a GPU by test_gpu.py, and by Triton's interpreter in test_kernels.py.

TRITON_INTERPRET=1 python tests/unit/encoders/kernel_checks.py
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core.encoders import kernels
from virnuc_core.encoders.attention import Rows, alibi_slopes, bind, reference, rotary_tables
from virnuc_core.encoders.esm2 import Esm2, place_esm2
from virnuc_core.encoders.layouts import inv_freq
from virnuc_core.encoders.packed import PackedBatch
from virnuc_core.encoders.precision import FP8, quantise_rows
from virnuc_core.encoders.segments import positions
from virnuc_core.encoders.shapes import Esm2Shape
from virnuc_core.encoders.tuning import Tuning
from virnuc_core.encoders.weights import RandomTensors

LENGTHS = (1, 52, 0, 67, 130, 2)
SLOTS = sum(LENGTHS) + 70  # the tail is longer than a block
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# of results of size 1: one rounding to the type, and the order of a sum
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def bounds(device: torch.device) -> Tensor:
    return (
        F.pad(torch.tensor(LENGTHS).cumsum(0), (1, 3), value=0)
        .index_fill(0, torch.tensor([len(LENGTHS) + 1, len(LENGTHS) + 2, len(LENGTHS) + 3]), sum(LENGTHS))
        .to(device, torch.int32)
    )


def check_rotary_attention(device: torch.device, dtype: torch.dtype, heads: int = 2, head_dim: int = 32) -> None:
    """Rotary attention, every length, NaN in the dead slots of the input."""
    torch.manual_seed(1)
    qkv = torch.randn(SLOTS, 3 * heads * head_dim).to(device, dtype)
    qkv[sum(LENGTHS) :] = torch.nan
    cos, sin = rotary_tables(inv_freq(head_dim).to(device), 256)
    cu = bounds(device)
    place = positions(cu, SLOTS)
    expected = reference(qkv, cu, cos[place], sin[place], None, heads, 140)
    got = kernels.fused_attention(qkv, cu, cos, sin, None, heads, 140, len(LENGTHS))
    close(got, expected, dtype)
    assert torch.equal(got[sum(LENGTHS) :], torch.zeros_like(got[sum(LENGTHS) :]))


def check_alibi_attention(device: torch.device, dtype: torch.dtype, heads: int = 2, head_dim: int = 32) -> None:
    """Attention with ALiBi, every length."""
    torch.manual_seed(2)
    qkv = torch.randn(SLOTS, 3 * heads * head_dim).to(device, dtype)
    cu, slopes = bounds(device), torch.tensor(alibi_slopes(heads), device=device)
    expected = reference(qkv, cu, None, None, slopes, heads, 140)
    close(kernels.fused_attention(qkv, cu, None, None, slopes, heads, 140, len(cu) - 1), expected, dtype)


def check_attention_bound(device: torch.device, dtype: torch.dtype) -> None:
    """A row's numbers do not depend on the bound of the batch: the one-block kernel and the loop agree bit for bit."""
    torch.manual_seed(3)
    qkv = torch.randn(130, 3 * 64).to(device, dtype)
    cu = torch.tensor([0, 52, 70, 130], dtype=torch.int32, device=device)
    slopes = torch.tensor(alibi_slopes(2), device=device)
    cos, sin = rotary_tables(inv_freq(32).to(device), 256)
    for tables in ((cos, sin, None), (None, None, slopes)):
        short, long = (kernels.fused_attention(qkv, cu, *tables, 2, bound, 3) for bound in (64, 256))
        assert torch.equal(short, long)


def check_norm(device: torch.device, dtype: torch.dtype) -> None:
    """Layer norm alone, with what is pending, and with biases left out of the stream."""
    torch.manual_seed(4)
    x, delta = (torch.randn(9, 160).to(device, dtype) for _ in range(2))
    affine = torch.randn(160).to(device, dtype), torch.randn(160).to(device, dtype)
    shift = torch.randn(160).to(device)
    wide = affine[0].float(), affine[1].float()
    close(kernels.norm(x, affine, 1e-5)[0], F.layer_norm(x.float(), (160,), *wide, 1e-5), dtype)
    expected = F.layer_norm((x + delta).float() + shift, (160,), *wide, 1e-5)
    untouched, kept = x.clone(), x.clone()
    close(kernels.norm(untouched, affine, 1e-5, delta=delta, shift=shift)[0], expected, dtype)
    assert torch.equal(untouched, x)
    close(kernels.norm(kept, affine, 1e-5, delta=delta, shift=shift, keep=True)[0], expected, dtype)
    assert torch.equal(kept, x + delta)


def check_activation(device: torch.device, dtype: torch.dtype) -> None:
    """Exact GELU, plain and gated."""
    torch.manual_seed(5)
    x = 3 * torch.randn(7, 192).to(device, dtype)
    close(kernels.activation(x)[0], F.gelu(x.float()), dtype)
    expected = F.gelu(x[:, :96].float()) * x[:, 96:].float()
    close(kernels.activation(x, gated=True)[0], expected, dtype)


def check_quantised(device: torch.device, dtype: torch.dtype) -> None:
    """Float8 rows and their scales. The interpreter truncates where hardware rounds, so it is held to one step more."""
    torch.manual_seed(6)
    x = 3 * torch.randn(7, 192).to(device, dtype)
    affine = torch.randn(192).to(device, dtype), torch.randn(192).to(device, dtype)
    normed = F.layer_norm(x.float(), (192,), affine[0].float(), affine[1].float(), 1e-5)
    for (rows, scale), plain in (
        (kernels.norm(x, affine, 1e-5, quantise=True), normed),
        (kernels.activation(x, quantise=True), F.gelu(x.float())),
        (kernels.activation(x, gelu=False, quantise=True), x.float()),
    ):
        expected_rows, expected_scale = quantise_rows(plain)
        assert scale is not None
        assert rows.dtype == FP8
        torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=0)
        # a step of float8 is an eighth; a value on the edge of two steps may fall to either side
        steps = 0.5 if INTERPRETED else 0.13
        torch.testing.assert_close(rows.float(), expected_rows.float(), rtol=steps, atol=2e-2)
        assert INTERPRETED or (rows.float() == expected_rows.float()).float().mean() > 0.99


def check_linear_gelu(device: torch.device, dtype: torch.dtype) -> None:
    """The first feed-forward product with its GELU; sizes that do and do not fill the blocks."""
    torch.manual_seed(7)
    for m, n, k in ((200, 304, 64), (130, 128, 192)):
        x = torch.randn(m, k).to(device, dtype)
        weight, bias = torch.randn(n, k).to(device, dtype) / 8, torch.randn(n).to(device, dtype)
        expected = F.gelu(x.float() @ weight.float().T + bias.float())
        close(kernels.linear_gelu(x, weight, bias), expected, dtype)
    weight = torch.randn(2 * 256, 192).to(device, dtype) / 8
    both = x.float() @ weight.float().T
    close(kernels.linear_gelu(x, weight, None, gated=True), F.gelu(both[:, :256]) * both[:, 256:], dtype)


def check_stack(device: torch.device, dtype: torch.dtype) -> None:
    """All layers of a small ESM-2 through the kernels, with and without residuals inside the products; float32 only."""
    shape = Esm2Shape(layers=2, width=64, heads=2, ffn_width=256)
    weights = place_esm2(RandomTensors(shape), shape, "fp32", device)
    cu = bounds(device)
    tokens = torch.randint(4, 24, (SLOTS,), generator=torch.Generator().manual_seed(8)).to(device)
    batch = PackedBatch(tokens, cu, len(LENGTHS), 140, sum(LENGTHS))
    plain = Esm2(shape, weights, precision="fp32", attention="reference", compile=False).embed(batch)
    for residual in (False, True):
        tuning = Tuning(kernels=True, residual_product=residual)
        encoder = Esm2(shape, weights, precision="fp32", attention="fused", compile=False, tuning=tuning)
        torch.testing.assert_close(encoder.embed(batch), plain, atol=1e-5, rtol=0)


def check_compiled_call(device: torch.device, dtype: torch.dtype) -> None:
    """A compiled block calls the kernel as one operator."""
    torch.manual_seed(9)
    qkv = torch.randn(SLOTS, 3 * 64).to(device, dtype)
    cos, sin = rotary_tables(inv_freq(32).to(device), 256)
    rows = Rows(bounds(device), 140, len(LENGTHS), 2, cos, sin)
    block = torch.compile(lambda x, attend: attend(2 * x, rows) + 1, backend="eager", fullgraph=True)
    got = block(qkv, bind("fused", compiled=True))
    assert torch.equal(got, bind("fused", compiled=False)(2 * qkv, rows) + 1)


CHECKS: dict[str, tuple[Callable[[torch.device, torch.dtype], None], tuple[torch.dtype, ...]]] = {
    "rotary_attention": (check_rotary_attention, (torch.float32, torch.float16, torch.bfloat16)),
    "alibi_attention": (check_alibi_attention, (torch.float32, torch.float16, torch.bfloat16)),
    "attention_bound": (check_attention_bound, (torch.float32, torch.float16)),
    "compiled_call": (check_compiled_call, (torch.float16,)),
    "norm": (check_norm, (torch.float32, torch.float16, torch.bfloat16)),
    "activation": (check_activation, (torch.float32, torch.float16, torch.bfloat16)),
    "quantised": (check_quantised, (torch.float16, torch.bfloat16)),
    "linear_gelu": (check_linear_gelu, (torch.float16, torch.bfloat16)),
    "stack": (check_stack, (torch.float32,)),
}


if __name__ == "__main__":
    for name, (check, dtypes) in CHECKS.items():
        for one in dtypes:
            if INTERPRETED and one == torch.bfloat16:
                continue  # nothing new, and the interpreter is slow
            check(torch.device("cpu"), one)
            print(f"{name} {one} ok", flush=True)
