"""Measure the ceiling of each GPU: the rate that the linear layers of an encoder sustain on it.

A process of its own measures each GPU, just before a run. Messages to it: a WorkerSpec. Messages
back: Ready, with the rates of all products, or Failed.

The products of int8 are our own code. A ceiling that is measured with the code that it judges says
nothing about the card. So the best product of a library is measured beside it, and the faster of
both is the ceiling. Products of fp8 are a reference: the card can compute as many of them in a
second, but they give other numbers.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from virnuc_core import gpus
from virnuc_core.baseline.run import next_message
from virnuc_core.config import EngineSpec
from virnuc_core.encoder_names import EncoderName, Molecule
from virnuc_core.encoders.checkpoint import load_models
from virnuc_core.encoders.hopper import find_library
from virnuc_core.encoders.layers import Layer, LinearLayer
from virnuc_core.encoders.precision import MIN_LARGEST, quantise_rows
from virnuc_core.encoders.registry import ENCODERS, PROTEIN_ENCODER, encoder_named
from virnuc_core.engine.process import LocalWorkers, Parent, Ready, WorkerSpec, worker_specs
from virnuc_core.engine.worker import warm_up
from virnuc_core.pipeline import model_flops
from virnuc_core.runfiles import Device, ModelFlops, ProductRate

log = logging.getLogger(__name__)

MAX_PENDING: Final = 4  # passes launched before the oldest is waited for
READING_INTERVAL_S: Final = 0.1  # between two readings of the power limit
FP8: Final = torch.float8_e4m3fn
FORMAT_NAMES: Final = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

Read = Callable[[], gpus.Reading]  # tells what the GPU is doing now
Step = Callable[[], object]
Product = Callable[[Tensor, Tensor, LinearLayer], Tensor]  # an input, its scales and the layer


def measure_ceilings(
    models: Path, devices: Sequence[Device], engine: EngineSpec, logs: Path
) -> ModelFlops:
    """Measure the ceilings of all GPUs at once, each in a process of its own.

    The ceiling is the rate in tokens/s that the linear layers of an encoder sustain on the GPU with
    the fastest product in the number format of the run. A run cannot be faster. A CPU has no
    ceiling.

    Args:
        models: The models directory.
        devices: The devices. Those that are no GPUs are passed over.
        engine: Settings of the runs that follow.
        logs: The folder for the log of each process.

    Returns:
        The multiplications that each encoder needs, with the ceilings by device and all products. A
        GPU whose memory does not hold the token budgets has no ceiling, which is logged.

    Raises:
        VirnucError: The models cannot be loaded on a GPU.
        WorkerError: A process failed otherwise, or ended without an answer.
    """
    gpus_to_measure = [device for device in devices if device.kind == "cuda"]
    products: list[ProductRate] = []
    with LocalWorkers(__name__) as workers:
        measuring = set()
        for spec in worker_specs(models, gpus_to_measure, engine):
            measuring.add(workers.start(spec, logs / f"ceiling-{spec.device.id}.log"))
        while measuring:
            worker, answer = next_message(workers, measuring)
            assert isinstance(answer, Ready)  # a failure was raised by `next_message`
            measuring.discard(worker)
            rates = [ProductRate.model_validate(rate) for rate in answer.record["products"]]
            if not rates:
                log.warning(
                    "%s: no ceiling was measured, its memory does not hold the token budgets",
                    worker.device,
                )
            products += rates
    return with_ceilings(model_flops(models), products)


def with_ceilings(flops: ModelFlops, products: Sequence[ProductRate]) -> ModelFlops:
    """Return the operations of the encoders with what was measured of their products.

    Args:
        flops: The operations for a token of each encoder.
        products: The products that were measured. The fastest of each encoder and device in the
            number format of the run is the ceiling there.
    """
    ceilings = defaultdict[Molecule, dict[str, float]](dict)  # by molecule and device
    for rate in ModelFlops.fastest(products):
        assert rate.tokens_per_s is not None
        ceilings[encoder_named(rate.encoder).molecule][rate.device] = rate.tokens_per_s
    return flops.model_copy(
        update={
            "protein_ceilings": ceilings["protein"],
            "dna_ceilings": ceilings["dna"],
            "products": tuple(products),
        }
    )


def work(parent: Parent, spec: WorkerSpec) -> None:
    """Measure the rate of each encoder's linear layers on this process's GPU and tell the parent.

    This is what a process of `measure_ceilings` runs. Every encoder is run once before, so that
    the kernels of the first run that follows are compiled, too. If the memory of the GPU does not
    hold a batch, no rate is sent. The process stays until the parent ends it.

    Args:
        parent: The connection to the process that started this one.
        spec: The models, the GPU and the settings.
    """
    device = torch.device("cuda:0")  # the only GPU that this process sees
    engine = spec.engine
    read = power_reader(spec.device.id)
    rates: list[ProductRate] = []
    try:
        models = load_models(Path(spec.models), device, engine)
        longest_row = PROTEIN_ENCODER.chunk_tokens(models.head.shape.model_length)
        for encoder in ENCODERS:
            network = models.encoders[encoder.name]
            warm_up(network, encoder.token_budget(engine), device, longest_row)
        for encoder in reversed(ENCODERS):
            layers = models.encoders[encoder.name].layers
            slots = encoder.token_budget(engine)
            for product in linear_products(layers, slots, device):
                sustained = measure_product(product, encoder.ceiling_s, read)
                rates.append(product_rate(product, encoder.name, spec.device.id, slots, sustained))
    except torch.OutOfMemoryError:
        rates = []  # a run reduces its budgets then, so there is no fixed ceiling
    parent.send(Ready(record={"products": [rate.model_dump() for rate in rates]}))
    parent.receive()  # wait until the parent ends this process


def power_reader(uuid: str) -> Read | None:
    """Return a function that reads a GPU, or `None` if NVML cannot be used, which is logged."""
    try:
        read = gpus.NVML.reader([uuid])
    except gpus.NvmlError as error:
        log.warning("NVML cannot be used (%s): power is not measured", error)
        return None

    def read_or_nothing() -> gpus.Reading:
        """Read the GPU. If that fails, nothing is known of it at that moment."""
        try:
            return read(uuid)
        except Exception as error:  # noqa: BLE001  a driver may fail in any way; the run must not
            log.warning("reading %s failed (%s): its power is not measured", uuid, error)
            return gpus.Reading()

    return read_or_nothing


@dataclass(frozen=True, slots=True)
class LinearProduct:
    """One implementation of matrix products for the linear layers of an encoder.

    Attributes:
        name: The implementation and its number format.
        role: "own": our product; "library": a product of a library in the number format of the
            encoder; "reference": one in another format.
        prepare: Returns a function that computes every linear layer once. Only the time counts, so
            it drops the results.
        is_used: Whether runs use this product.
    """

    name: str
    role: Literal["own", "library", "reference"]
    prepare: Callable[[], Step]
    is_used: bool = False


def linear_products(
    layers: Sequence[Layer], slots: int, device: torch.device
) -> list[LinearProduct]:
    """Return the products to measure for an encoder, the one that runs use first.

    Inputs of int8 layers are quantised beforehand, so that only the products are timed.

    Args:
        layers: The layers of the encoder, all with linear layers of the same shapes.
        slots: The number of tokens, which are random.
        device: The device.
    """
    linears = layers[0].products
    inputs = [_random_input(linear, slots, device) for linear in linears]

    def prepare(product: Product) -> Callable[[], Step]:
        """Return a function that prepares the layers as they are."""
        return lambda: _pass(layers, inputs, product)

    def prepare_fp8() -> Step:
        """Convert inputs and weights to fp8.

        The weights of one layer serve all layers, which spares memory. They are too large for the
        cache anyway.
        """
        fp8_inputs = [_fp8_rows(x.float() * scale) for x, scale in inputs]
        fp8_layer = layers[0]._replace(
            qkv=_fp8_linear(layers[0].qkv),
            out=_fp8_linear(layers[0].out),
            up=_fp8_linear(layers[0].up),
            down=_fp8_linear(layers[0].down),
        )
        return _pass([fp8_layer] * len(layers), fp8_inputs, _fp8_product)

    if linears[0].scale is None:
        library = "cuBLAS" if device.type == "cuda" else "torch"
        name = f"{library}, {FORMAT_NAMES[linears[0].weight.dtype]}"
        return [LinearProduct(name, "library", prepare(_torch_product), is_used=True)]
    kernel = "Triton kernel" if find_library(device) is None else "CUTLASS kernel"
    own_name = f"virnuc's {kernel}, int8"
    return [
        LinearProduct(own_name, "own", prepare(_own_int8_product), is_used=True),
        LinearProduct(
            "cuBLAS (torch._int_mm), int8, sums without scales",
            "library",
            prepare(_library_int8_product),
        ),
        LinearProduct("torch._scaled_mm, fp8 with a scale for each row", "reference", prepare_fp8),
    ]


def _pass(
    layers: Sequence[Layer], inputs: Sequence[tuple[Tensor, Tensor]], product: Product
) -> Step:
    """Return a function that computes every linear layer of an encoder once.

    Args:
        layers: The layers. They have the same shapes, so the same inputs serve all of them.
        inputs: The input of each linear layer, and the scales of its rows.
        product: Multiplies an input with a linear layer.
    """

    def run_layers() -> None:
        """Compute every linear layer once, and drop the results."""
        for layer in layers:
            for linear, (x, scale) in zip(layer.products, inputs, strict=True):
                product(x, scale, linear)

    return run_layers


def _torch_product(x: Tensor, _: Tensor, linear: LinearLayer) -> Tensor:
    """Multiply with a linear layer that is not int8."""
    return F.linear(x, linear.weight, linear.bias)


def _own_int8_product(x: Tensor, scale: Tensor, linear: LinearLayer) -> Tensor:
    """Multiply with an int8 layer as runs do."""
    from virnuc_core.encoders.kernels import int8_product  # it needs triton

    return int8_product(x, scale, linear)


def _library_int8_product(x: Tensor, _: Tensor, linear: LinearLayer) -> Tensor:
    """Multiply with an int8 layer by the library behind torch. The sums are int32, without scales.

    This is less work than a run needs, which makes the ceiling higher, not lower.
    """
    return torch._int_mm(x, linear.weight.t())


def _fp8_product(x: Tensor, scale: Tensor, linear: LinearLayer) -> Tensor:
    """Multiply rows of fp8 with an fp8 weight, both with a scale for each row, to bf16."""
    assert linear.scale is not None
    return torch._scaled_mm(
        x,
        linear.weight.t(),
        scale_a=scale,
        scale_b=linear.scale[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to fp8, so that the largest number of each row becomes the largest of fp8.

    Args:
        x: float32 [rows, width].

    Returns:
        The rows in fp8, and what undoes the scaling of each row, float32 [rows, 1].
    """
    largest = x.abs().amax(dim=1, keepdim=True).clamp_min(MIN_LARGEST)
    scale = largest / torch.finfo(FP8).max
    return (x / scale).to(FP8), scale


def _fp8_linear(linear: LinearLayer) -> LinearLayer:
    """Convert an int8 layer to fp8, without its bias."""
    assert linear.scale is not None
    weight, scale = _fp8_rows(linear.weight.float() * linear.scale[:, None])
    return LinearLayer(weight, None, scale.squeeze(1))


def _random_input(linear: LinearLayer, slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random inputs of a linear layer, [slots, width], in the number type of its weights.

    The second result is the scale of each row, by which int8 numbers are multiplied. It is 1 if the
    layer is not int8.
    """
    x = torch.randn(slots, linear.weight.shape[1], device=device)
    if linear.scale is None:
        return x.to(linear.weight.dtype), torch.ones(slots, 1, device=device)
    return quantise_rows(x)


@dataclass(frozen=True, slots=True)
class Sustained:
    """What was measured while a step ran again and again. `None`: not measured."""

    calls_per_s: float
    joules_per_call: float | None = None
    power_limited: float | None = None  # share of the readings at the power limit, 0 to 1


def measure_product(product: LinearProduct, seconds: float, read: Read | None) -> Sustained | None:
    """Run a product for at least `seconds`. Returns `None` if one that runs do not use fails.

    A library may lack a product for this GPU, or memory may not hold its results. It is logged.

    Raises:
        RuntimeError: The product that runs use failed.
    """
    try:
        return sustained_rate(product.prepare(), seconds, read)
    except RuntimeError as error:
        if product.is_used:
            raise
        log.warning("%s: not measured (%s)", product.name, " ".join(str(error).split())[:300])
        return None


def product_rate(
    product: LinearProduct,
    encoder: EncoderName,
    device: str,
    slots: int,
    sustained: Sustained | None,
) -> ProductRate:
    """Return the record of a measured product.

    Args:
        product: The product.
        encoder: The encoder whose layers it computed.
        device: The name of the device.
        slots: The tokens of each call.
        sustained: What was measured, or `None`.
    """
    if sustained is None:
        return ProductRate(encoder=encoder, device=device, product=product.name, role=product.role)
    joules_per_million_tokens = None
    if sustained.joules_per_call is not None and sustained.joules_per_call > 0:
        joules_per_million_tokens = sustained.joules_per_call / slots * 1e6
    return ProductRate(
        encoder=encoder,
        device=device,
        product=product.name,
        role=product.role,
        tokens_per_s=slots * sustained.calls_per_s,
        joules_per_million_tokens=joules_per_million_tokens,
        power_limited=sustained.power_limited,
    )


def sustained_rate(step: Step, seconds: float, read: Read | None = None) -> Sustained:
    """Run `step` on the current CUDA device for at least `seconds`, after a warm-up.

    A few calls are launched ahead, so that the device never waits for Python. Without a CUDA device
    the calls follow each other.

    Args:
        step: Launches work.
        seconds: The time.
        read: Reads the device, for its energy and its power limit. The first half of the time does
            not count for the power limit, because the card may still be cool.
    """
    has_cuda = torch.cuda.is_available()
    pending_events: list[torch.cuda.Event] = []  # each is reached when its call is done
    limited: list[bool] = []
    n_calls = 0
    with torch.inference_mode():
        step()  # the warm-up
        _settle()
        first_energy_j = read().energy_j if read is not None else None
        started_s = time.perf_counter()
        next_reading_s = started_s + seconds / 2
        while n_calls == 0 or time.perf_counter() - started_s < seconds:
            step()
            n_calls += 1
            if has_cuda:
                event = torch.cuda.Event()
                event.record()
                pending_events.append(event)
                if len(pending_events) > MAX_PENDING:
                    oldest_event = pending_events.pop(0)
                    oldest_event.synchronize()
            if read is not None and time.perf_counter() >= next_reading_s:
                is_power_limited = read().is_power_limited
                if is_power_limited is not None:
                    limited.append(is_power_limited)
                next_reading_s = time.perf_counter() + READING_INTERVAL_S
        _settle()
        elapsed_s = time.perf_counter() - started_s
        last_energy_j = read().energy_j if read is not None else None
    joules_per_call = None
    if first_energy_j is not None and last_energy_j is not None:
        joules_per_call = (last_energy_j - first_energy_j) / n_calls
    power_limited = sum(limited) / len(limited) if limited else None
    return Sustained(n_calls / elapsed_s, joules_per_call, power_limited)


def _settle() -> None:
    """Wait until the CUDA device has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
