"""A models directory to models on a device."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from virnuc_core.config import Attention, EngineSpec, Precision
from virnuc_core.encoders.attention import choose_backend
from virnuc_core.encoders.checkpoint import check_tokenizer, open_dnabert, open_esm2, open_head
from virnuc_core.encoders.dnabert_s import DnabertS, place_dnabert
from virnuc_core.encoders.esm2 import Esm2, place_esm2
from virnuc_core.encoders.head import Head, place_head
from virnuc_core.encoders.precision import Resolved, resolve_precision
from virnuc_core.encoders.tokenize import DnabertTokenizer
from virnuc_core.encoders.tuning import GATED_COLUMNS, PLAIN, Tuning, measured_best
from virnuc_core.errors import DeviceError


def load_esm2(
    models: Path,
    device: torch.device,
    precision: Precision = "auto",
    attention: Attention = "auto",
    compile: bool | None = None,
    tuning: Tuning | None = None,
) -> Esm2:
    """The ESM-2 of a models directory on `device`.

    Raises `WeightsError` when a file is missing or wrong, `DeviceError` or `ConfigError` when the device cannot run
    what is asked for. Without a `tuning` the fastest way that was measured is taken.
    """
    shape, tensors = open_esm2(models)
    ready = resolve_precision(precision, device)
    backend = choose_backend(attention, bias="rotary", head_dim=shape.head_dim, precision=ready, device=device)
    tuning = _tuned(tuning, compile, device, ready, gated=False)
    weights = place_esm2(tensors, shape, ready, device)
    compiled = _compiled(compile, device, tuning)
    return Esm2(shape, weights, precision=ready, attention=backend, compile=compiled, tuning=tuning)


def load_dnabert_s(
    models: Path,
    device: torch.device,
    precision: Precision = "auto",
    attention: Attention = "auto",
    compile: bool | None = None,
    tuning: Tuning | None = None,
) -> DnabertS:
    """The DNABERT-S of a models directory on `device`; raises as `load_esm2` does.

    `attention="varlen"` is meant for ESM-2: flash attention takes no ALiBi bias, so it raises `ConfigError` here.
    """
    shape, tensors = open_dnabert(models)
    tokenizer = DnabertTokenizer(models)
    check_tokenizer(models, tokenizer, shape)
    ready = resolve_precision(precision, device)
    backend = choose_backend(attention, bias="alibi", head_dim=shape.head_dim, precision=ready, device=device)
    tuning = _tuned(tuning, compile, device, ready, gated=shape.ffn_width % GATED_COLUMNS == 0)
    weights = place_dnabert(tensors, shape, ready, device)
    return DnabertS(
        shape,
        weights,
        pad_id=tokenizer.pad_id,
        precision=ready,
        attention=backend,
        compile=_compiled(compile, device, tuning),
        tuning=tuning,
    )


def load_head(models: Path, device: torch.device) -> Head:
    """The classifier of a models directory; `WeightsError` when its inputs are not what the encoders give."""
    shape, tensors = open_head(models)
    return Head(shape, place_head(tensors, device))


class Encoders(NamedTuple):
    """All three models on one device."""

    esm2: Esm2
    dnabert_s: DnabertS
    head: Head


def load_all(models: Path, device: torch.device, engine: EngineSpec) -> Encoders:
    """The models as an engine's settings want them; raises as the three loaders do."""
    biased: Attention = "auto" if engine.attention == "varlen" else engine.attention  # varlen takes no ALiBi bias
    # fp8 turns DNABERT-S's vectors (cosine 0.89), and it is a thirtieth of the time: it keeps fp16
    dna_precision: Precision = "fp16" if engine.precision == "fp8" else engine.precision
    return Encoders(
        load_esm2(models, device, engine.precision, engine.attention, engine.compile),
        load_dnabert_s(models, device, dna_precision, biased, engine.compile),
        load_head(models, device),
    )


def _tuned(
    asked: Tuning | None, compile: bool | None, device: torch.device, precision: Resolved, *, gated: bool
) -> Tuning:
    if asked is None:
        return PLAIN if compile else measured_best(device, precision, gated=gated)
    _check_device(asked, device)
    return asked


def _compiled(asked: bool | None, device: torch.device, tuning: Tuning) -> bool:
    return (device.type == "cuda" and not tuning.kernels) if asked is None else asked


def _check_device(tuning: Tuning, device: torch.device) -> None:
    if tuning.kernels and device.type != "cuda":
        raise DeviceError(f"tuning: kernels need a CUDA device, this is {device}; leave them off")
    if tuning.gated_product and torch.cuda.get_device_capability(device) < (9, 0):
        name = torch.cuda.get_device_name(device)
        raise DeviceError(f"tuning: gated_product needs compute capability 9.0 or later, {name} is older; leave it off")
