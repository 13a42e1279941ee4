"""The attention call: what each backend refuses, and the reference beside torch's own attention."""

from __future__ import annotations

import importlib.util
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from virnuc_core.encoders import attention
from virnuc_core.encoders.attention import Backend, Rows, alibi_slopes, choose_backend, reference, rotary_tables, rotate
from virnuc_core.encoders.tensor_files import inv_freq
from virnuc_core.errors import ConfigError, DeviceError

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)  # only named: nothing is put there


@pytest.mark.parametrize("asked", ["varlen", "fused"])
def test_a_cuda_backend_on_a_cpu_raises_in_one_line(asked: Backend) -> None:
    with pytest.raises(DeviceError, match=f"'{asked}' needs a CUDA device") as caught:
        choose_backend(asked, bias="rotary", head_dim=64, precision="fp32", device=CPU)
    assert "\n" not in str(caught.value)


def test_flash_attention_refuses_what_it_cannot_compute() -> None:
    with pytest.raises(ConfigError, match="ALiBi"):
        choose_backend("varlen", bias="alibi", head_dim=64, precision="fp16", device=CUDA)
    with pytest.raises(ConfigError, match="fp16 or bf16 only"):
        choose_backend("varlen", bias="rotary", head_dim=64, precision="fp32", device=CUDA)
    with pytest.raises(ConfigError, match="not 20"):
        choose_backend("varlen", bias="rotary", head_dim=20, precision="fp16", device=CUDA)


def test_the_fused_kernel_refuses_odd_head_sizes() -> None:
    with pytest.raises(ConfigError, match="not 24"):
        choose_backend("fused", bias="rotary", head_dim=24, precision="fp16", device=CUDA)


def test_the_fused_kernel_without_triton_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match="triton, which is not installed"):
        choose_backend("fused", bias="rotary", head_dim=64, precision="fp16", device=CUDA)
    assert choose_backend("auto", bias="rotary", head_dim=64, precision="fp16", device=CUDA) == "varlen"
    assert choose_backend("auto", bias="alibi", head_dim=64, precision="fp16", device=CUDA) == "reference"


def test_auto_takes_the_first_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert choose_backend("auto", bias="rotary", head_dim=64, precision="fp16", device=CUDA) == "fused"
    assert choose_backend("auto", bias="alibi", head_dim=64, precision="fp32", device=CUDA) == "fused"
    assert choose_backend("auto", bias="rotary", head_dim=16, precision="bf16", device=CUDA) == "varlen"
    assert choose_backend("auto", bias="rotary", head_dim=16, precision="fp32", device=CUDA) == "reference"
    assert choose_backend("auto", bias="rotary", head_dim=64, precision="fp32", device=CPU) == "reference"


@pytest.mark.parametrize("small_portions", [False, True])
def test_reference_equals_torch_attention_row_by_row(small_portions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small_portions:
        monkeypatch.setattr(attention, "REFERENCE_SCORES", 1)
    torch.manual_seed(0)
    heads, dim, lengths = 3, 8, (5, 17, 1, 16, 40)
    qkv = torch.randn(sum(lengths) + 9, 3 * heads * dim)
    qkv[sum(lengths) :] = torch.nan  # dead slots
    cu = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    slopes = torch.tensor(alibi_slopes(heads))
    got = reference(qkv, Rows(cu, len(lengths), max(lengths), heads, slopes=slopes))
    for start, end in pairwise(cu):
        q, k, v = qkv[start:end].view(-1, 3, heads, dim).permute(1, 2, 0, 3)
        at = torch.arange(end - start)
        bias = -slopes.view(-1, 1, 1) * (at[:, None] - at).abs()
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        torch.testing.assert_close(got[start:end], expected.transpose(0, 1).flatten(1), atol=2e-6, rtol=0)
    assert torch.equal(got[sum(lengths) :], torch.zeros(9, heads * dim))


def test_rotation_turns_pairs_by_their_angle() -> None:
    frequencies = inv_freq(8)
    assert frequencies.tolist() == pytest.approx([1, 0.1, 0.01, 0.001])
    cos, sin = rotary_tables(frequencies, 200)
    x = torch.randn(200, 2, 8, dtype=torch.float64)
    turned = rotate(x, cos, sin).double()
    as_complex = torch.complex(x[..., :4], x[..., 4:])
    angles = torch.outer(torch.arange(200), frequencies.double())
    expected = as_complex * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    torch.testing.assert_close(
        turned, torch.cat((expected.real, expected.imag), -1), atol=5e-5, rtol=0
    )  # float32 angles


def test_rotary_tables_are_float32_whatever_the_frequencies() -> None:
    cos, sin = rotary_tables(inv_freq(64).half(), 4)
    assert cos.dtype == sin.dtype == torch.float32
