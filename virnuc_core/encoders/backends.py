"""The choice of an implementation for attention and the operations around it, behind one interface.

An encoder computes with the operations of one `Backend`. There are two:

`reference` (any device)
    Attention: `reference.reference_attention`. Norms and means: `reference.layer_norm`,
    `reference.segment_mean`. Plain torch operations.
`fused` (NVIDIA GPUs)
    Attention: `attention_kernels.fused_attention`. Norms and means: `kernels.norm`,
    `kernels.span_means`. Our own Triton kernels.

The user chooses one of them or `auto`. `choose_backend` decides once, when an encoder is loaded,
and the decision is written to the run record. A chosen implementation is never replaced by the
other: if it cannot run, an error says why.

To add an implementation, for example for GPUs under ROCm:

1. Write a module with an attention function of the type `Attend`. It takes packed queries, keys and
   values [slots, 3 * width] and the layout of the rows, and returns [slots, width] with zeros in
   dead slots. A row's result must not depend on its neighbours.
2. Add its name to `BackendName` and to `config.Attention`, and a branch to `load_backend` that
   imports the module there, so that other machines do not need its packages.
3. Say in `choose_backend` which devices it runs on. (torch calls ROCm devices `cuda`, too;
   `torch.version.hip` tells them apart.)
4. Hold it against `reference` as `tests/unit/encoders/kernel_checks.py` does with `fused`.
"""

import functools
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from virnuc_core.config import Attention
from virnuc_core.encoders.positions import RowLayout
from virnuc_core.errors import ConfigError, DeviceError, IncapableError, join_first

BackendName = Literal["fused", "reference"]
Affine = tuple[Tensor, Tensor]  # weight and bias of a norm, [width] each

FUSED_HEADS: Final = (32, 64, 128)  # head sizes that the attention kernel is written for


Attend = Callable[[Tensor, RowLayout], Tensor]  # [slots, 3 * width] → [slots, width]
Norm = Callable[[Tensor, Affine, float, Tensor | None], Tensor]  # x, weights, epsilon, shift
Mean = Callable[[Tensor, Tensor, Tensor], Tensor]  # x, starts and ends of spans


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of the operations that an encoder can compute in more than one way.

    Attributes:
        name: Name in the run record.
        attend: Computes attention within rows. Takes packed queries, keys and values
            [slots, 3 * width] and the layout of the rows, and returns [slots, width].
        norm: Computes the layer norm of `x + shift`, [rows, width]. Without `has_kernels`, `shift`
            is always None.
        mean: Computes the means of `x` [slots, width] over spans of slots, float32 [spans, width].
        has_kernels: Whether the other functions of the module `kernels` can be used, too: int8
            products, DNABERT-S's gated unit, and products that are added to the residual stream in
            place. These products leave out the bias, and the following norm adds it as `shift`.
    """

    name: BackendName
    attend: Attend
    norm: Norm
    mean: Mean
    has_kernels: bool


def load_backend(name: BackendName) -> Backend:
    """Return the operations of one implementation: attention, norm and mean.

    The modules are imported here, because the kernels need Triton and not every machine has it.
    """
    if name == "fused":
        from virnuc_core.encoders.attention_kernels import fused_attention
        from virnuc_core.encoders.kernels import norm, span_means

        return Backend("fused", fused_attention, norm, span_means, has_kernels=True)

    from virnuc_core.encoders.reference import layer_norm, reference_attention, segment_mean

    return Backend("reference", reference_attention, layer_norm, segment_mean, has_kernels=False)


def choose_backend(requested: Attention, head_dim: int, device: torch.device) -> BackendName:
    """Choose between our Triton kernels ("fused") and plain torch operations ("reference").

    The setting `auto` means `fused` if the device is an NVIDIA GPU and the kernels are written for
    attention heads of this size, else `reference`.

    Args:
        requested: The user's setting: auto, fused or reference.
        head_dim: Width of one attention head of the encoder.
        device: Where the encoder runs.

    Raises:
        IncapableError: The device or the machine cannot run the requested implementation.
        ConfigError: `fused` was requested, but no kernel is written for heads of this size.
    """
    if requested == "reference":
        return "reference"
    if device.type != "cuda":
        if requested == "fused":
            raise IncapableError(
                f"attention 'fused' needs a CUDA device, this is {device}; use reference or auto"
            )
        return "reference"
    if head_dim not in FUSED_HEADS:
        if requested == "fused":
            raise ConfigError(
                f"attention 'fused' wants heads of 32, 64 or 128, not {head_dim}; "
                "use reference or auto"
            )
        return "reference"
    # Without a usable GPU nothing is checked here: torch raises an error as soon as the device is
    # used.
    if torch.cuda.is_available():
        problem = triton_problem()
        if problem:
            # `auto` must not fall back to `reference` here. If the run were continued later on a
            # machine with Triton, its files would mix results of both implementations.
            raise IncapableError(
                f"our kernels need Triton, {problem}; "
                "or use --attention reference, several times slower"
            )
    return "fused"


@functools.cache
def triton_problem() -> str:
    """Return why Triton cannot run on this machine and what to install; "" if Triton can run.

    Triton compiles its driver module at its first use on a machine, so it needs a C compiler. The
    answer is computed once and kept for the life of the process.
    """
    try:
        from triton.runtime import driver

        # `active` is a lazy attribute: reading it compiles and loads the driver module.
        assert driver.active is not None
    except ModuleNotFoundError:
        return "which is not installed: pip install triton"
    # What Triton raises if there is no driver or no compiler, or if the compiler fails.
    except (
        RuntimeError,
        AssertionError,
        ImportError,
        OSError,
        subprocess.SubprocessError,
    ) as error:
        reason = " ".join(str(error).split())  # in one line
        if isinstance(error, subprocess.CalledProcessError):
            # The compiler has printed its own messages on the terminal already.
            compiler = error.cmd[0]
            reason = f"{compiler} ended with status {error.returncode}, as it says above"
        return (
            f"which cannot start ({reason}); it wants a C compiler and Python's headers: "
            "install gcc and python3-dev"
        )
    return ""


def torch_device(name: str) -> torch.device:
    """Return the torch device with this name, for instance `cuda:0`, after using it once.

    Raises:
        DeviceError: There is no such device, or it cannot be used.
    """
    try:
        device = torch.device(name)
        # torch.device checks only the spelling. Allocating a number and copying it to the host
        # shows that the device works.
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"device {name} cannot be used: {join_first([error])}") from error
    return device
