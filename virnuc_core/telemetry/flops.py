"""Model FLOPs, energy and cost: what the work needs, against what the device can give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TERA: Final = 1e12

# Dense peak of the tensor cores in TFLOP/s, from the makers' data sheets (without sparsity).
# Keys: part of the device's name; the first that fits counts, so longer names stand first.
DATASHEET_TFLOPS: Final[tuple[tuple[str, dict[str, float]], ...]] = (
    ("H200", {"fp16": 989.5, "bf16": 989.5, "fp8": 1979.0, "fp32": 67.0}),
    ("H100 PCIe", {"fp16": 756.0, "bf16": 756.0, "fp8": 1513.0, "fp32": 51.0}),
    ("H100", {"fp16": 989.5, "bf16": 989.5, "fp8": 1979.0, "fp32": 67.0}),
    ("A100", {"fp16": 312.0, "bf16": 312.0, "fp32": 19.5}),
    ("L40S", {"fp16": 362.0, "bf16": 362.0, "fp8": 733.0, "fp32": 91.6}),
    ("L4", {"fp16": 121.0, "bf16": 121.0, "fp8": 242.5, "fp32": 30.3}),
    ("RTX 4090", {"fp16": 165.2, "bf16": 165.2, "fp8": 330.3, "fp32": 82.6}),
    ("RTX 3090", {"fp16": 71.0, "bf16": 71.0, "fp32": 35.6}),
    ("V100", {"fp16": 125.0, "fp32": 15.7}),
    ("T4", {"fp16": 65.0, "fp32": 8.1}),
)


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """Sizes of an encoder that decide its FLOPs."""

    layers: int
    width: int
    ffn_width: int
    gated: bool = False  # two input projections in the feed-forward part, as in DNABERT-S


def linear_flops_per_token(shape: EncoderShape) -> float:
    """FLOPs of the linear layers for one token: 2 per weight.

    >>> linear_flops_per_token(EncoderShape(layers=36, width=2560, ffn_width=10240)) / 1e9
    5.66231040
    """
    attention = 4 * shape.width * shape.width  # q, k, v, out
    feed_forward = (3 if shape.gated else 2) * shape.width * shape.ffn_width
    return 2.0 * shape.layers * (attention + feed_forward)


def attention_flops_per_token(shape: EncoderShape, mean_length: float) -> float:
    """FLOPs of scores and weighted sum for one token of a sequence of `mean_length` tokens."""
    return 4.0 * shape.layers * shape.width * mean_length


def datasheet_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of a device at a precision; `None` when the table does not have it."""
    for part, peaks in DATASHEET_TFLOPS:
        if part in device_name:
            peak = peaks.get(precision)
            return None if peak is None else peak * TERA
    return None


def mfu(
    tokens: float, flops_per_token: float, device_seconds: float, ceiling_flops_per_s: float | None
) -> float | None:
    """Model FLOPs per device second ÷ the ceiling of one device, 0 to 1; `None` when time or ceiling is not known."""
    if ceiling_flops_per_s is None or ceiling_flops_per_s <= 0 or device_seconds <= 0:
        return None
    return tokens * flops_per_token / device_seconds / ceiling_flops_per_s


@dataclass(frozen=True, slots=True)
class Cost:
    """What a million reads take. `None` where it was not measured or no price was given."""

    device_hours_per_million: float | None
    kwh_per_million: float | None
    price_per_million: float | None


def cost_per_million(
    reads: int, devices: int, seconds: float, energy_kwh: float | None, price_per_device_hour: float | None
) -> Cost:
    """Device hours, energy and price of a million reads, from a run of `reads` reads."""
    if reads <= 0 or devices <= 0 or seconds <= 0:
        return Cost(None, None, None)
    millions = reads / 1e6
    hours = devices * seconds / 3600.0 / millions
    return Cost(
        device_hours_per_million=hours,
        kwh_per_million=None if energy_kwh is None else energy_kwh / millions,
        price_per_million=None if price_per_device_hour is None else hours * price_per_device_hour,
    )
