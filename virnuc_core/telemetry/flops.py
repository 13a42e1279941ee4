"""Model FLOPs: what an encoder used of its devices, against what they can give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def datasheet_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of a device at a precision; `None` when the table does not have it."""
    for part, peaks in DATASHEET_TFLOPS:
        if part in device_name:
            peak = peaks.get(precision)
            return None if peak is None else peak * TERA
    return None


@dataclass(frozen=True, slots=True)
class EncoderWork:
    """What one device put through one encoder."""

    device: str
    name: str  # the device's model
    tokens: int
    device_s: float


def mean_ceiling(work: Sequence[EncoderWork], ceilings: Mapping[str, float]) -> float | None:
    """Tokens/s of the devices' ceilings, each weighted by its seconds; `None` when one was not measured."""
    spent = sum(one.device_s for one in work)
    if spent <= 0 or any(one.device not in ceilings for one in work):
        return None
    return sum(one.device_s * ceilings[one.device] for one in work) / spent


def mfu_of_ceiling(work: Sequence[EncoderWork], ceilings: Mapping[str, float]) -> float | None:
    """Tokens ÷ the tokens the devices' linear layers alone would have done in the same device seconds."""
    ceiling = mean_ceiling(work, ceilings)
    if ceiling is None or ceiling <= 0:
        return None
    return sum(one.tokens for one in work) / (ceiling * sum(one.device_s for one in work))


def mfu_of_datasheet(work: Sequence[EncoderWork], flops_per_token: float | None, precision: str) -> float | None:
    """Model FLOPs ÷ what the devices' data sheets promise for the same seconds; `None` where one does not say."""
    peaks = [datasheet_flops(one.name, precision) for one in work]
    promised = sum(one.device_s * peak for one, peak in zip(work, peaks, strict=True) if peak is not None)
    if flops_per_token is None or None in peaks or promised <= 0:
        return None
    return sum(one.tokens for one in work) * flops_per_token / promised
