"""The parts of an encoder: linear layers, weights of a layer, and the networks' base class.

Attention, norms and means come from a backend (`backends`), number formats from `precision`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from virnuc_core.encoders.backends import Affine, BackendName, load_backend
from virnuc_core.encoders.model_config import DnabertShape, Esm2Shape
from virnuc_core.encoders.precision import DTYPES, Resolved, quantise_rows, rotated
from virnuc_core.encoders.registry import EncoderInfo
from virnuc_core.encoders.tokenize import PackedBatch
from virnuc_core.errors import ConfigError

Read = Callable[[str], Tensor]  # reads a tensor of a model by our name for it

SMOOTHING: Final = 0.65  # share of the inputs' unevenness that moves to the weights
INT8_MULTIPLE: Final = 16  # the kernels take rows of multiples of this width


class InputStatistics(NamedTuple):
    """What a linear layer was given for some rows of reads, float32 [in] each."""

    largest: Tensor  # largest absolute value
    mean: Tensor


Calibration = Sequence[Mapping[str, InputStatistics]]  # of each layer, by the names of its products


def as_calibration(layers: Sequence[Mapping[str, NDArray[np.float32]]]) -> Calibration:
    """Convert the arrays that `calibration.read_calibration` read to tensors."""
    calibration = []
    for layer in layers:
        statistics = {}
        for name, values in layer.items():
            largest, mean = torch.from_numpy(values)
            statistics[name] = InputStatistics(largest, mean)
        calibration.append(statistics)
    return calibration


class Dense(NamedTuple):
    """A linear layer ready to run."""

    weight: Tensor  # [out, in]; int8 if `scale` is set
    bias: Tensor | None  # [out]
    scale: Tensor | None = None  # float32 [out]: what a row of `weight` was divided by

    @property
    def wide_bias(self) -> Tensor:
        """The bias in float32. The layer must have one."""
        assert self.bias is not None
        return self.bias.float()


def dense(x: Tensor, layer: Dense) -> Tensor:
    """Compute `x @ weight.T + bias` by plain torch; for an int8 layer `x` is rotated and rounded.

    Args:
        x: [rows, in].
        layer: The linear layer.

    Returns:
        [rows, out], in the format of `x`.
    """
    if layer.scale is None or layer.bias is None:
        return F.linear(x, layer.weight, layer.bias)
    rows, scale = quantise_rows(rotated(x.half().float()))
    sums = (rows.double() @ layer.weight.double().t()).float()  # exact
    return (sums * scale * layer.scale + layer.bias).to(x.dtype)


class Layer(NamedTuple):
    """Weights of one layer of an encoder."""

    attn_norm: Affine
    qkv: Dense
    out: Dense
    ffn_norm: Affine
    up: Dense  # DNABERT-S activates the first half of its output and multiplies it by the second
    down: Dense

    @property
    def products(self) -> tuple[Dense, ...]:
        """The linear layers, in the order of `PRODUCTS`."""
        return self.qkv, self.out, self.up, self.down


def quantise_layer(
    layer: Layer, inputs: Mapping[str, InputStatistics], dtype: torch.dtype
) -> Layer:
    """Prepare a layer in float32 to run in int8.

    The inputs of products behind a norm are smoothed (SmoothQuant, Xiao et al. 2022): the norm
    divides by column and the weights are multiplied, so that neither has columns that are far
    larger than others.

    Args:
        layer: The layer, float32.
        inputs: What its linear layers were given for some reads, by the names in `PRODUCTS`.
        dtype: Format of the norms' weights.

    Raises:
        ConfigError: A linear layer has a width that the kernels cannot take.
    """
    attn_norm, qkv = _quantise_behind_norm(layer.attn_norm, layer.qkv, inputs["qkv"], dtype)
    ffn_norm, up = _quantise_behind_norm(layer.ffn_norm, layer.up, inputs["up"], dtype)
    out = _quantise_dense(layer.out, inputs["out"].mean)
    down = _quantise_dense(layer.down, inputs["down"].mean)
    return Layer(attn_norm, qkv, out, ffn_norm, up, down)


def _quantise_behind_norm(
    norm: Affine, layer: Dense, inputs: InputStatistics, dtype: torch.dtype
) -> tuple[Affine, Dense]:
    """Smooth a norm and the linear layer behind it, and round the layer's weights to int8."""
    largest_input = inputs.largest.to(layer.weight.device)
    largest_weight = layer.weight.abs().amax(0)
    input_part = largest_input.clamp_min(1e-5) ** SMOOTHING
    weight_part = largest_weight.clamp_min(1e-5) ** (1 - SMOOTHING)
    factor = input_part / weight_part  # [in]
    smoothed = layer._replace(weight=layer.weight * factor)
    quantised = _quantise_dense(smoothed, inputs.mean.to(factor.device) / factor)
    weight, bias = norm
    return ((weight / factor).to(dtype), (bias / factor).to(dtype)), quantised


def _quantise_dense(layer: Dense, mean_input: Tensor) -> Dense:
    """Rotate a linear layer's weights and round them to int8.

    What rounding changes for the mean input is taken off the bias.
    """
    width = layer.weight.shape[1]
    if width % INT8_MULTIPLE:
        raise ConfigError(f"precision int8 wants rows of a multiple of 16, not {width}; use fp16")
    exact = rotated(layer.weight)
    weight, scale = quantise_rows(exact)
    rotated_mean = rotated(mean_input.to(exact.device)[None])[0]
    bias = layer.wide_bias + (exact - weight * scale) @ rotated_mean
    return Dense(weight, bias, scale.squeeze(1))


def read_affine(read: Read, name: str) -> Affine:
    """Read weight and bias of a linear layer or a norm."""
    return read(f"{name}.weight").contiguous(), read(f"{name}.bias")


class FeedForward(NamedTuple):
    """Names of the two products of an encoder's feed-forward part."""

    up: str
    down: str
    up_has_bias: bool


def read_layer(read: Read, index: int, names: FeedForward) -> Layer:
    """Read the weights of one layer of an encoder."""
    prefix = f"layers.{index}"
    if names.up_has_bias:
        up = Dense(*read_affine(read, f"{prefix}.{names.up}"))
    else:
        up = Dense(read(f"{prefix}.{names.up}.weight").contiguous(), None)
    return Layer(
        attn_norm=read_affine(read, f"{prefix}.attn_norm"),
        qkv=Dense(*read_affine(read, f"{prefix}.qkv")),
        out=Dense(*read_affine(read, f"{prefix}.out")),
        ffn_norm=read_affine(read, f"{prefix}.ffn_norm"),
        up=up,
        down=Dense(*read_affine(read, f"{prefix}.{names.down}")),
    )


class Encoder(ABC):
    """A network that turns packed tokens into one vector for each row, on one device."""

    INFO: ClassVar[EncoderInfo]  # its entry in the registry
    FEED_FORWARD: ClassVar[FeedForward]

    def __init__(
        self,
        shape: Esm2Shape | DnabertShape,
        read: Read,
        device: torch.device,
        *,
        precision: Resolved,
        attention: BackendName,
        calibration: Calibration | None = None,
    ) -> None:
        """Load the weights to a device.

        Args:
            shape: Sizes of the network.
            read: Reads a tensor of the model by our name for it.
            device: Where the network runs.
            precision: Number format that it runs in.
            attention: Which implementation runs its layers, see `backends`.
            calibration: For int8, what its linear layers are given.
        """
        self.shape = shape
        self.width = shape.width
        self.precision: Resolved = precision
        self.attention: BackendName = attention
        self.dense = dense  # calibration replaces it, to record what the linear layers are given
        self._backend = load_backend(attention)
        dtype = DTYPES[precision]

        def read_to_device(name: str) -> Tensor:
            tensor = read(name)
            if device.type == "cuda":  # several times as fast from page-locked memory
                return tensor.pin_memory().to(device, non_blocking=True)
            return tensor.to(device)

        def read_wide(name: str) -> Tensor:
            return read_to_device(name).float()

        def read_ready(name: str) -> Tensor:
            return read_to_device(name).to(dtype)

        layers = []
        for index in range(shape.layers):
            if calibration is None:
                layer = read_layer(read_ready, index, self.FEED_FORWARD)
            else:
                wide_layer = read_layer(read_wide, index, self.FEED_FORWARD)
                layer = quantise_layer(wide_layer, calibration[index], dtype)
            layers.append(layer)
        self.layers = tuple(layers)
        self._read_rest(read_wide, read_ready)

    @abstractmethod
    def _read_rest(self, read_wide: Read, read_ready: Read) -> None:
        """Read the weights outside the layers, in float32 or in the running format."""

    def embed(self, batch: PackedBatch) -> Tensor:
        """Embed the rows of a batch: the mean of the last layer's output over each row's tokens.

        A row's values depend only on its own tokens, the weights, the precision and the number of
        slots. The device is never synchronised.

        Returns:
            float32 [row_capacity, width]; rows past `batch.rows` are zero.
        """
        with torch.inference_mode():
            hidden_states = self.hidden(batch)
            starts, ends = self.pooled_spans(batch.cu_seqlens)
            return self._backend.mean(hidden_states, starts, ends)

    def _add_product(self, stream: Tensor, x: Tensor, layer: Dense) -> Tensor:
        """Return the residual stream with a product of `x` added.

        The kernels overwrite `stream`, which saves a pass over memory, and leave the product's bias
        to the norms behind it.
        """
        if self._backend.has_kernels:
            return stream.addmm_(x, layer.weight.t())
        return stream + self.dense(x, layer)

    @abstractmethod
    def hidden(self, batch: PackedBatch) -> Tensor:
        """Return the output of the last layer, [slots, width]."""

    @abstractmethod
    def pooled_spans(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the span of slots that is averaged for each row.

        Returns:
            First slot and slot after the last one, int32 [row_capacity] each.
        """
