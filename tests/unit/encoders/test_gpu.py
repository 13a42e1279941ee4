"""What only a GPU can show: kernels and backends beside the reference, precision at real size, equality bit for bit."""

from __future__ import annotations

import importlib.util
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from virnuc_core.config import Int8Kernels
from virnuc_core.encoders.backends import BackendName
from virnuc_core.encoders.checkpoint import load_encoder
from virnuc_core.encoders.convert import random_tensor
from virnuc_core.encoders.layers import Encoder, LinearLayer
from virnuc_core.encoders.model_config import DNABERT_SIZES, ESM2_SIZES, DnabertShape, Esm2Shape
from virnuc_core.encoders.models import DnabertS, Esm2
from virnuc_core.encoders.precision import Resolved, hadamard_rotation
from virnuc_core.encoders.tokenize import DnabertTokenizer, Esm2Tokenizer, PackedBatch

from .encoder_batches import dnas, packed, packed_tokens, proteins

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # of torch and triton on whatever machine this is
]

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
WIDE = Esm2Shape(layers=2, width=2560, heads=40, ffn_width=10240)  # two layers of the 3B
DNA = DnabertShape(layers=2, width=768, heads=12, ffn_width=3072, vocab=4096)

BACKENDS: tuple[BackendName, ...] = ("reference", "fused")
THRESHOLD: dict[Resolved, float] = {
    "fp32": 0.9999999,
    "fp16": 0.99999,
    "bf16": 0.9995,
    "int8": 0.998,
}
# post-norm layers carry rounding on: over four draws of weights an H200 gave at least 0.99997 in fp16, 0.9982 in bf16;
# plain torch in the same precision 0.99998 and 0.9981
DNABERT_THRESHOLD: dict[Resolved, float] = {"fp16": 0.9999, "bf16": 0.997}
NO_WORSE = 1.1  # times the mean error of plain torch in the same precision: the same draws gave 0.96 to 1.04


WITH_INT8 = pytest.mark.skipif(not HOPPER, reason="int8 needs compute capability 9.0")
COMBINATIONS = tuple(
    pytest.param(
        precision, way, marks=[WITH_INT8] if precision == "int8" else [], id=f"{precision} {way}"
    )
    for precision in THRESHOLD
    for way in BACKENDS
)

DNA_COMBINATIONS = tuple(
    (precision, way) for precision in ("fp32", "fp16", "bf16") for way in BACKENDS
)


@cache
def esm2(shape: Esm2Shape, precision: Resolved, way: BackendName) -> Esm2:
    return _made(shape, precision, way)


def _made(
    shape: Esm2Shape, precision: Resolved, way: BackendName, int8_kernels: Int8Kernels = "auto"
) -> Esm2:
    """With random weights; int8 as a batch of rows told."""
    from .kernel_checks import input_statistics

    read_tensor = partial(random_tensor, shape)
    calibration = None
    if precision == "int8":
        half = Esm2(shape, read_tensor, GPU, precision="fp16", attention="reference")
        calibration = input_statistics(half, protein_batch(list(range(48))))
    return Esm2(
        shape,
        read_tensor,
        GPU,
        precision=precision,
        attention=way,
        calibration=calibration,
        int8_kernels=int8_kernels,
    )


@cache
def dnabert(precision: Resolved, way: BackendName) -> DnabertS:
    return DnabertS(DNA, partial(random_tensor, DNA), GPU, precision=precision, attention=way)


def protein_batch(order: list[int], *, slots: int = 4096, max_seqlen: int = 256) -> PackedBatch:
    rows = proteins([3 + 5 * i % 165 for i in range(48)], seed=2)
    return packed(
        Esm2Tokenizer(), [rows[i] for i in order], slots=slots, capacity=64, max_seqlen=max_seqlen
    ).to(GPU)


def dna_tokens(order: list[int], slots: int = 4096) -> PackedBatch:
    """Rows of random token ids: the base model's vocabulary without its tokenizer."""
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(5, 4096, (3 + 7 * i % 120,), generator=generator) for i in range(48)]
    return packed_tokens([rows[i] for i in order], 3, slots=slots, capacity=64, max_seqlen=128).to(
        GPU
    )


def cosine(got: Tensor, expected: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(got.double().cpu(), expected.double().cpu(), dim=1)


# -- kernels -----------------------------------------------------------------------------------------------------------

NEW = ("int8", "gated_unit")  # need compute capability 9.0
KERNELS = (
    "rotary_attention",
    "alibi_attention",
    "attention_bound",
    "norm",
    "span_means",
    "stack",
    *NEW,
)


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_equals_plain_torch(name: str) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if name in NEW and not HOPPER:
        pytest.skip("needs compute capability 9.0")
    from .kernel_checks import CHECKS

    check, dtypes = CHECKS[name]
    for dtype in dtypes:
        check(GPU, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_attention_of_the_real_head_sizes(dtype: torch.dtype) -> None:
    from .kernel_checks import check_attention

    check_attention(True, GPU, dtype, heads=40, head_dim=64)
    check_attention(False, GPU, dtype, heads=12, head_dim=64)


# -- encoders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "way"), COMBINATIONS)
def test_esm2_equals_the_cpu_in_float32(precision: Resolved, way: BackendName) -> None:
    order = list(range(40))
    got = esm2(WIDE, precision, way).embed(protein_batch(order))
    plain = esm2(WIDE, "fp32", "reference").embed(protein_batch(order))
    each = cosine(got[:40], plain[:40])
    print(f"esm2, two wide layers, {precision} {way}: min {each.min():.8f} mean {each.mean():.8f}")
    assert each.min() >= THRESHOLD[precision]
    assert torch.equal(got[40:], torch.zeros_like(got[40:]))


@pytest.mark.parametrize(("precision", "way"), DNA_COMBINATIONS)
def test_dnabert_s_equals_the_cpu_in_float32(precision: Resolved, way: BackendName) -> None:
    order = list(range(40))
    got = dnabert(precision, way).embed(dna_tokens(order))
    plain = dnabert("fp32", "reference").embed(dna_tokens(order))
    each = cosine(got[:40], plain[:40])
    print(f"dnabert_s, two layers, {precision} {way}: min {each.min():.8f} mean {each.mean():.8f}")
    assert each.min() >= THRESHOLD[precision]


def test_tiny_models_on_the_gpu_equal_the_cpu(models: Path) -> None:
    rows, strands = proteins([1, 50, 166, 33]), dnas([3, 150, 500, 60])
    batch = packed(Esm2Tokenizer(), rows, slots=512, capacity=8, max_seqlen=256)
    dna_batch = packed(DnabertTokenizer(models), strands, slots=1024, capacity=8, max_seqlen=512)
    for kind, one in ((Esm2, batch), (DnabertS, dna_batch)):
        on_gpu = load_encoder(kind, models, GPU, "fp32").embed(one.to(GPU)).cpu()
        torch.testing.assert_close(
            on_gpu, load_encoder(kind, models, CPU).embed(one), atol=2e-5, rtol=0
        )


@pytest.mark.parametrize(("precision", "way"), COMBINATIONS)
def test_a_row_is_the_same_bits_with_any_neighbours(precision: Resolved, way: BackendName) -> None:
    encoder = esm2(WIDE, precision, way)
    _same_bits(encoder, protein_batch, list(range(48)))


@pytest.mark.parametrize(("precision", "way"), DNA_COMBINATIONS)
def test_a_dna_row_is_the_same_bits_with_any_neighbours(
    precision: Resolved, way: BackendName
) -> None:
    _same_bits(dnabert(precision, way), dna_tokens, list(range(48)))


def _same_bits(one: Encoder, batch: Any, order: list[int]) -> None:
    all_rows = one.embed(batch(order))
    shuffled_order = [
        order[i] for i in torch.randperm(48, generator=torch.Generator().manual_seed(9)).tolist()
    ]
    shuffled_rows = one.embed(batch(shuffled_order))
    fewer_rows = one.embed(batch(shuffled_order[:3]))
    for place, row in enumerate(shuffled_order):
        assert torch.equal(shuffled_rows[place], all_rows[row]), f"row {row} at place {place}"
    for place, row in enumerate(shuffled_order[:3]):
        assert torch.equal(fewer_rows[place], all_rows[row])


@pytest.mark.parametrize("name", ["esm2", "dnabert_s"])
def test_embedding_never_waits_for_the_device(name: str) -> None:
    order = list(range(30))
    encoder = esm2(WIDE, "fp16", "fused") if name == "esm2" else dnabert("fp16", "fused")
    batch = protein_batch(order) if name == "esm2" else dna_tokens(order)
    encoder.embed(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        encoder.embed(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_long_rows_run_too() -> None:
    rows = proteins([1500, 40], seed=3)
    batch = packed(Esm2Tokenizer(), rows, slots=2048, capacity=4).to(GPU)
    got = esm2(WIDE, "fp16", "fused").embed(batch)
    plain = esm2(WIDE, "fp32", "reference").embed(batch)
    assert cosine(got[:2], plain[:2]).min() >= THRESHOLD["fp16"]


def test_auto_picks_our_kernels_and_says_so(models: Path) -> None:
    encoder = load_encoder(Esm2, models, GPU)
    assert (encoder.attention, encoder.precision) == ("fused", "fp16")


# -- the library for Hopper GPUs, and the table of the first layer ---------------------------------------------------


@pytest.mark.skipif(not IS_HOPPER, reason="the library is built for compute capability 9.0")
@pytest.mark.parametrize("m", [1, 7, 129, 1000, 16384])
@pytest.mark.parametrize(
    ("n", "k"),
    [(7680, 2560), (2560, 2560), (10240, 2560), (2560, 10240), (960, 320), (8, 16), (1000, 48)],
)
def test_library_multiplies_bit_for_bit_as_triton_does(m: int, n: int, k: int) -> None:
    from virnuc_core.encoders import hopper, kernels

    assert hopper.library_problem(GPU) == ""
    generator = torch.Generator(GPU).manual_seed(m + n + k)

    def int8(*shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, generator=generator, device=GPU, dtype=torch.int8)

    x, weight = int8(m, k), int8(n, k)
    row_scale = torch.rand(m, 1, generator=generator, device=GPU) / 100
    scale = torch.rand(n, generator=generator, device=GPU) / 1000
    layer = LinearLayer(weight, torch.randn(n, generator=generator, device=GPU), scale)
    stream = torch.randn(m, n, generator=generator, device=GPU).half()
    for adds in (False, True):
        expected = stream.clone()
        kernels.triton_int8_product(x, row_scale, layer, expected, adds=adds)
        target = stream.clone()
        got = kernels.int8_product(x, row_scale, layer, target if adds else None)
        assert (got is target) is adds
        assert torch.equal(got.view(torch.int16), expected.view(torch.int16))


@pytest.mark.skipif(not IS_HOPPER, reason="the library is built for compute capability 9.0")
@pytest.mark.parametrize("rows", [1, 2, 5, 1003])
@pytest.mark.parametrize(
    ("width", "preparation"),
    [
        (1280, "norm"),
        (2560, "norm"),
        (1280, "nothing"),
        (2560, "nothing"),
        (5120, "gelu"),
        (10240, "gelu"),
    ],
)
def test_library_rounds_rows_as_float64_and_triton_do(
    rows: int, width: int, preparation: str
) -> None:
    from virnuc_core.encoders import hopper, kernels

    library = hopper.find_library(GPU)
    assert library is not None
    generator = torch.Generator(GPU).manual_seed(rows + width)
    x = torch.randn(rows, width, generator=generator, device=GPU)
    x[:, ::97] *= 60  # a few columns are much larger, as in real rows
    x[-1] *= 1e-3
    half = x.half()
    weight = (1 + torch.randn(width, generator=generator, device=GPU) / 5).half()
    bias = (torch.randn(width, generator=generator, device=GPU) / 10).half()
    exact = half.double()
    options: dict[str, Any] = {}
    if preparation == "norm":
        options = {"norm": (weight, bias), "eps": 1e-5}
        exact = torch.nn.functional.layer_norm(
            exact, (width,), weight.double(), bias.double(), 1e-5
        )
    elif preparation == "gelu":
        options = {"gelu": True}
        exact = torch.nn.functional.gelu(exact)
    rotation = hadamard_rotation(width, GPU)
    exact = (exact.reshape(rows, -1, 64) @ rotation.double()).flatten(1)

    got, scale = kernels.int8_rows(half, rotation, library, **options)
    plain, plain_scale = kernels.int8_rows(half, rotation, **options)
    assert got.dtype == torch.int8
    torch.testing.assert_close(scale, plain_scale, rtol=2e-3, atol=0)
    assert (got.int() - plain.int()).abs().max() <= 1
    error = (got.double() * scale - exact).norm() / exact.norm()
    plain_error = (plain.double() * plain_scale - exact).norm() / exact.norm()
    assert error <= 1.01 * plain_error


@pytest.mark.skipif(not IS_HOPPER, reason="the library is built for compute capability 9.0")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_library_loses_no_nan(bad: float) -> None:
    from virnuc_core.encoders import hopper

    library = hopper.find_library(GPU)
    assert library is not None
    for width, gelu in ((2560, False), (10240, True)):
        x = torch.ones(9, width, device=GPU, dtype=torch.float16)
        x[4, 17] = bad
        affine = (torch.ones(width, device=GPU).half(), torch.zeros(width, device=GPU).half())
        for norm in (None,) if gelu else (None, affine):
            _rows, scale = library.round_rows(x, norm=norm, eps=1e-5, gelu=gelu)
            assert scale.isfinite().flatten().tolist() == [i != 4 for i in range(9)]


@pytest.mark.skipif(not IS_HOPPER, reason="the library is built for compute capability 9.0")
def test_rows_are_rounded_by_the_kernels_that_were_asked_for() -> None:
    wide = protein_batch(list(range(48)))
    embeddings = {}
    choices: tuple[Int8Kernels, ...] = ("hopper", "triton")
    for kernels in choices:
        encoder = _made(WIDE, "int8", "fused", kernels)
        assert (encoder.rows_library is not None) is (kernels == "hopper")
        embeddings[kernels] = encoder.embed(wide)[:48]
    each = cosine(embeddings["hopper"], embeddings["triton"])
    print(f"int8 by the library and by Triton: min {each.min():.8f}")
    assert each.min() >= 0.999
    assert not torch.equal(embeddings["hopper"], embeddings["triton"])


@pytest.mark.parametrize("precision", ["fp32", "fp16", pytest.param("int8", marks=WITH_INT8)])
def test_first_layer_from_a_table_gives_the_same_bits(precision: Resolved) -> None:
    encoder = _made(WIDE, precision, "fused")
    batch = protein_batch(list(range(48)))
    _assert_equal_without_table(encoder, batch)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("slots", [1024, 8192])
def test_first_layer_of_dnabert_s_from_a_table_gives_the_same_bits(
    precision: Resolved, slots: int
) -> None:
    encoder = DnabertS(
        DNA, partial(random_tensor, DNA), GPU, precision=precision, attention="fused"
    )
    # 1,024 slots are less than the 4,096 tokens of the vocabulary
    _assert_equal_without_table(encoder, dna_tokens(list(range(12)), slots=slots))


def _assert_equal_without_table(encoder: Encoder, batch: PackedBatch) -> None:
    """Embed a batch with the table and without it."""
    with_table = encoder.embed(batch)
    assert list(encoder._qkv_tables) == [len(batch.tokens)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "_first_qkv", lambda tokens, compute: compute(tokens))
        assert torch.equal(encoder.embed(batch), with_table)


# -- real size ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16", pytest.param("int8", marks=WITH_INT8)])
def test_3b_shaped_embeddings_keep_their_direction(precision: Resolved) -> None:
    each = cosine(_big(precision, "fused"), _big("fp32", "reference"))
    p1 = each.quantile(0.01)
    print(
        f"esm2 3B shape, random weights, {precision}: min {each.min():.7f} p1 {p1:.7f} mean {each.mean():.7f}"
    )
    assert each.min() >= THRESHOLD[precision]


@cache
def _big(precision: Resolved, way: BackendName) -> Tensor:
    shape = ESM2_SIZES["t36_3B"]
    encoder = _made(shape, precision, way)
    rows = proteins([10 + 3 * i % 157 for i in range(96)], seed=5)
    batch = packed(Esm2Tokenizer(), rows, slots=9216, capacity=128, max_seqlen=256).to(GPU)
    means = encoder.embed(batch)[:96].cpu()
    del encoder
    torch.cuda.empty_cache()
    return means


@pytest.mark.parametrize("precision", list(DNABERT_THRESHOLD))
def test_base_dnabert_s_keeps_its_direction_as_well_as_plain_torch(precision: Resolved) -> None:
    exact = _base("fp32", "reference")
    each, plain = (
        cosine(_base(precision, "fused"), exact),
        cosine(_base(precision, "reference"), exact),
    )
    print(
        f"dnabert_s base, random weights, {precision}: min {each.min():.7f} mean {each.mean():.7f}"
    )
    assert each.min() >= DNABERT_THRESHOLD[precision]
    assert 1 - each.mean() <= NO_WORSE * (1 - plain.mean())


@cache
def _base(precision: Resolved, way: BackendName) -> Tensor:
    shape = DNABERT_SIZES["base"]
    encoder = DnabertS(
        shape, partial(random_tensor, shape), GPU, precision=precision, attention=way
    )
    return encoder.embed(dna_tokens(list(range(48))))[:48].cpu()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_gelu_by_tanh_is_that_of_torch_and_near_the_exact_one(precision: Resolved) -> None:
    build = partial(Esm2, WIDE, partial(random_tensor, WIDE), GPU, precision=precision)
    batch = protein_batch(list(range(48)))
    fused = build(attention="fused", gelu="tanh").embed(batch)[:48].double()
    plain = build(attention="reference", gelu="tanh").embed(batch)[:48].double()
    exact = build(attention="fused").embed(batch)[:48].double()
    assert not torch.equal(fused, exact)
    for other in (plain, exact):
        middle = other.mean(0)
        cosines = torch.nn.functional.cosine_similarity(fused - middle, other - middle)
        assert cosines.min() > {"fp16": 0.999, "bf16": 0.99}[precision]
