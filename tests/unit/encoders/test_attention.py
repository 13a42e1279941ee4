"""The attention call: what each backend refuses, and the reference beside torch's own attention."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from virnuc_core.config import Attention
from virnuc_core.encoders import backends, reference
from virnuc_core.encoders.backends import choose_backend
from virnuc_core.encoders.positions import (
    RowLayout,
    alibi_slopes,
    rotary_frequencies,
    rotary_tables,
    rotate,
)
from virnuc_core.encoders.reference import reference_attention
from virnuc_core.errors import ConfigError, IncapableError

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)  # only named: nothing is put there


def test_our_kernels_on_a_cpu_raise_in_one_line() -> None:
    with pytest.raises(IncapableError, match="'fused' needs a CUDA device") as error_info:
        choose_backend("fused", 64, CPU)
    assert "\n" not in str(error_info.value)
    assert choose_backend("auto", 64, CPU) == "reference"


def test_our_kernels_refuse_odd_head_sizes_and_auto_leaves_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "triton_problem", lambda: "")
    with pytest.raises(ConfigError, match="not 24"):
        choose_backend("fused", 24, CUDA)
    assert choose_backend("auto", 24, CUDA) == "reference"
    assert choose_backend("auto", 64, CUDA) == "fused"
    assert choose_backend("reference", 64, CUDA) == "reference"


class NoCompiler:
    """Triton's driver where it cannot build its module."""

    @property
    def active(self) -> object:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one.")


class Refused:
    """Triton's driver where the compiler that it calls fails."""

    @property
    def active(self) -> object:
        raise subprocess.CalledProcessError(1, ["/usr/bin/gcc", "cuda_utils.c"])


@pytest.mark.parametrize("asked", ["auto", "fused"])
@pytest.mark.parametrize(
    ("name", "there", "said"),
    [
        ("triton", None, "Triton, which is not installed"),
        (
            "triton.runtime",
            SimpleNamespace(driver=NoCompiler()),
            r"\(Failed to find C compiler\. Please specify one\.\)",
        ),
        (
            "triton.runtime",
            SimpleNamespace(driver=Refused()),
            r"\(/usr/bin/gcc ended with status 1.*install gcc and pyth",
        ),
    ],
)
def test_without_triton_a_gpu_is_refused_in_one_line_unless_plain_torch_is_asked_for(
    asked: Attention, name: str, there: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto`, too: were it to choose plain torch, a run that goes on where Triton works would mix both."""
    backends.triton_problem.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # An import of `triton.runtime` does not look at `triton` if another test has imported it before.
    monkeypatch.delitem(sys.modules, "triton.runtime", raising=False)
    monkeypatch.setitem(sys.modules, name, there)
    with pytest.raises(IncapableError, match=said) as error_info:
        choose_backend(asked, 64, CUDA)
    assert "\n" not in str(error_info.value)
    assert str(error_info.value).endswith("or use --attention reference, several times slower")
    assert choose_backend("reference", 64, CUDA) == "reference"
    assert choose_backend("auto", 24, CUDA) == choose_backend("auto", 64, CPU) == "reference", (
        "there is no other there"
    )
    backends.triton_problem.cache_clear()


@pytest.mark.parametrize("small_portions", [False, True])
def test_reference_equals_torch_attention_row_by_row(
    small_portions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small_portions:
        monkeypatch.setattr(reference, "MAX_SCORES", 1)
    torch.manual_seed(0)
    heads, dim, lengths = 3, 8, (5, 17, 1, 16, 40)
    qkv = torch.randn(sum(lengths) + 9, 3 * heads * dim)
    qkv[sum(lengths) :] = torch.nan  # dead slots
    cu = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    slopes = torch.tensor(alibi_slopes(heads))
    got = reference_attention(qkv, RowLayout(cu, len(lengths), max(lengths), heads, slopes=slopes))
    for start, end in pairwise(cu):
        q, k, v = qkv[start:end].view(-1, 3, heads, dim).permute(1, 2, 0, 3)
        positions = torch.arange(end - start)
        bias = -slopes.view(-1, 1, 1) * (positions[:, None] - positions).abs()
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        torch.testing.assert_close(
            got[start:end], expected.transpose(0, 1).flatten(1), atol=2e-6, rtol=0
        )
    assert torch.equal(got[sum(lengths) :], torch.zeros(9, heads * dim))


def test_rotation_turns_pairs_by_their_angle() -> None:
    frequencies = rotary_frequencies(8)
    assert frequencies.tolist() == pytest.approx([1, 0.1, 0.01, 0.001])
    cos, sin = rotary_tables(frequencies, 200)
    x = torch.randn(200, 2, 8, dtype=torch.float64)
    rotated_x = rotate(x, cos, sin).double()
    as_complex = torch.complex(x[..., :4], x[..., 4:])
    angles = torch.outer(torch.arange(200), frequencies.double())
    expected = as_complex * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    torch.testing.assert_close(
        rotated_x, torch.cat((expected.real, expected.imag), -1), atol=5e-5, rtol=0
    )  # float32 angles


def test_rotary_tables_are_float32_whatever_the_frequencies() -> None:
    cos, sin = rotary_tables(rotary_frequencies(64).half(), 4)
    assert cos.dtype == sin.dtype == torch.float32
