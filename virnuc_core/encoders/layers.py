"""What all encoders share: linear layers, the weights of a transformer layer, and the base class.

Attention, norms and means are implemented by a backend (see `backends`). The number formats are
defined in `precision`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from virnuc_core.config import Gelu, Int8Kernels
from virnuc_core.encoders.backends import Affine, BackendName, load_backend
from virnuc_core.encoders.hopper import HopperLibrary, choose_library
from virnuc_core.encoders.model_config import AnyEncoderShape
from virnuc_core.encoders.precision import DTYPES, Resolved, quantise_rows, rotated
from virnuc_core.encoders.registry import EncoderInfo
from virnuc_core.encoders.tokenize import PackedBatch
from virnuc_core.errors import ConfigError

TensorReader = Callable[[str], Tensor]  # returns a tensor of a model, given our name for the tensor

# SmoothQuant's alpha: how much of the differences between input columns moves to the weights
SMOOTHING: Final = 0.65
MIN_LARGEST: Final = 1e-5  # stands for the largest number of a column of zeros in a division
INT8_MULTIPLE: Final = 16  # the kernels take rows of multiples of this width


class InputStatistics(NamedTuple):
    """The inputs of a linear layer, measured on some of the user's reads: float32 [in] each."""

    largest: Tensor  # largest absolute value of each input
    mean: Tensor  # mean of each input


# The statistics of an encoder: one mapping for each layer, by the names in `PRODUCTS`
Calibration = Sequence[Mapping[str, InputStatistics]]


def as_calibration(layers: Sequence[Mapping[str, NDArray[np.float32]]]) -> Calibration:
    """Convert the arrays of a stored calibration to tensors.

    Args:
        layers: For each transformer layer, by the names of its linear layers: the largest and the
            mean inputs, [2, in].
    """
    calibration = []
    for layer in layers:
        statistics = {}
        for name, values in layer.items():
            largest, mean = torch.from_numpy(values)
            statistics[name] = InputStatistics(largest, mean)
        calibration.append(statistics)
    return calibration


class LinearLayer(NamedTuple):
    """The weights of one linear layer, in the format in which it runs."""

    weight: Tensor  # [out, in]; int8 if `scale` is set
    bias: Tensor | None  # [out]
    scale: Tensor | None = None  # float32 [out]: what each row of an int8 `weight` was divided by

    @property
    def float32_bias(self) -> Tensor:
        """Return the bias in float32. The layer must have a bias."""
        assert self.bias is not None
        return self.bias.float()


def apply_linear(x: Tensor, layer: LinearLayer) -> Tensor:
    """Compute `x @ weight.T + bias` by plain torch operations.

    For an int8 layer this gives the numbers of the kernels: `x` is rotated and rounded to int8,
    too. The weights of such a layer are rotated in the same way, so that the product stays the
    same. The rotation mixes neighbouring numbers of a row, which makes the rounding finer.

    Args:
        x: [rows, in].
        layer: The linear layer.

    Returns:
        [rows, out], in the format of `x`.
    """
    if layer.scale is None:
        return F.linear(x, layer.weight, layer.bias)

    assert layer.bias is not None  # an int8 layer always has one: it corrects rounding errors
    rotated_rows = rotated(x.half().float())  # through fp16, like the input of the kernels
    int8_rows, row_scale = quantise_rows(rotated_rows)  # int8 [rows, in], float32 [rows, 1]
    # Sums of int8 products are exact in float64, as they are in the kernels' int32.
    sums = int8_rows.double() @ layer.weight.double().t()  # [rows, out]
    product = sums.float() * row_scale * layer.scale
    return (product + layer.bias).to(x.dtype)


class Layer(NamedTuple):
    """The weights of one transformer layer: attention, then the feed-forward part."""

    attn_norm: Affine
    qkv: LinearLayer  # queries, keys and values of all heads
    out: LinearLayer
    ffn_norm: Affine
    up: LinearLayer  # in DNABERT-S twice as wide: half of its output gates the other half
    down: LinearLayer

    @property
    def products(self) -> tuple[LinearLayer, ...]:
        """The linear layers, in the order of `PRODUCTS`."""
        return self.qkv, self.out, self.up, self.down


def quantise_layer(
    layer: Layer, inputs: Mapping[str, InputStatistics], dtype: torch.dtype
) -> Layer:
    """Convert a transformer layer from float32 to int8.

    int8 has one scale for a whole row, so a single large column would make all others inexact. The
    inputs of the linear layers `qkv` and `up` come from a norm and are smoothed (SmoothQuant, Xiao
    et al. 2022): the norm's output is divided by a factor for each column, and the weight's column
    is multiplied by it. The product stays the same, and the large numbers are shared between both.

    Args:
        layer: The layer in float32.
        inputs: Statistics of the inputs of its linear layers, by their names: qkv, out, up, down.
        dtype: Format of the norms' weights.

    Returns:
        The same layer with int8 weights.

    Raises:
        ConfigError: A linear layer has a width that the kernels cannot take.
    """
    attn_norm, qkv = _quantise_behind_norm(layer.attn_norm, layer.qkv, inputs["qkv"], dtype)
    ffn_norm, up = _quantise_behind_norm(layer.ffn_norm, layer.up, inputs["up"], dtype)
    return Layer(
        attn_norm=attn_norm,
        qkv=qkv,
        out=_quantise_linear(layer.out, inputs["out"].mean),
        ffn_norm=ffn_norm,
        up=up,
        down=_quantise_linear(layer.down, inputs["down"].mean),
    )


def _quantise_behind_norm(
    norm: Affine, layer: LinearLayer, inputs: InputStatistics, dtype: torch.dtype
) -> tuple[Affine, LinearLayer]:
    """Smooth a norm and the linear layer behind it, and convert the linear layer to int8.

    Args:
        norm: Weight and bias of the norm.
        layer: The linear layer that takes the norm's output, float32.
        inputs: Statistics of the linear layer's inputs.
        dtype: Format of the returned norm.

    Returns:
        The norm, whose output is divided by the smoothing factors, and the int8 layer.
    """
    # The paper's factor of a column: largest input ** alpha / largest weight ** (1 - alpha)
    largest_input = inputs.largest.to(layer.weight.device)  # [in]
    largest_weight = layer.weight.abs().amax(0)  # [in]
    input_part = largest_input.clamp_min(MIN_LARGEST) ** SMOOTHING
    weight_part = largest_weight.clamp_min(MIN_LARGEST) ** (1 - SMOOTHING)
    factor = input_part / weight_part  # [in]

    smoothed_layer = layer._replace(weight=layer.weight * factor)
    smoothed_mean = inputs.mean.to(factor.device) / factor
    int8_layer = _quantise_linear(smoothed_layer, smoothed_mean)
    norm_weight, norm_bias = norm
    smoothed_norm = ((norm_weight / factor).to(dtype), (norm_bias / factor).to(dtype))
    return smoothed_norm, int8_layer


def _quantise_linear(layer: LinearLayer, mean_input: Tensor) -> LinearLayer:
    """Convert a linear layer to int8: rotate its weights, and round each row in equal steps.

    The rotation mixes neighbouring numbers of a row, so that no single large number makes the steps
    too wide. The inputs are rotated in the same way later, so the product stays the same.

    Rounding the weights changes the output. What the output for the mean input loses is added to
    the bias, so that the errors are zero on average.

    Args:
        layer: The layer, float32.
        mean_input: Mean of its inputs, float32 [in].

    Returns:
        The int8 layer. Its `scale` has a number for each row of the weight.

    Raises:
        ConfigError: The kernels cannot take rows of this width.
    """
    width = layer.weight.shape[1]
    if width % INT8_MULTIPLE:
        raise ConfigError(f"precision int8 wants rows of a multiple of 16, not {width}; use fp16")
    rotated_weight = rotated(layer.weight)
    int8_weight, scale = quantise_rows(rotated_weight)  # int8 [out, in], float32 [out, 1]
    rounding_error = rotated_weight - int8_weight * scale
    mean_row = mean_input.to(rotated_weight.device)[None]  # [1, in]
    rotated_mean = rotated(mean_row)[0]
    corrected_bias = layer.float32_bias + rounding_error @ rotated_mean  # [out]
    return LinearLayer(int8_weight, corrected_bias, scale.squeeze(1))


def load_affine(read_tensor: TensorReader, name: str) -> Affine:
    """Return weight and bias of a linear layer or of a norm.

    Args:
        read_tensor: Returns a tensor when it is given our name for the tensor.
        name: Our name for the layer, without `.weight` and `.bias`.
    """
    # The kernels expect the rows of a weight one after the other in memory.
    return read_tensor(f"{name}.weight").contiguous(), read_tensor(f"{name}.bias")


class FeedForward(NamedTuple):
    """Our names for the two linear layers of an encoder's feed-forward part."""

    up: str
    down: str
    up_has_bias: bool


def load_layer(read_tensor: TensorReader, index: int, names: FeedForward) -> Layer:
    """Return the weights of one transformer layer of an encoder.

    Args:
        read_tensor: Returns a tensor when it is given our name for the tensor.
        index: Number of the layer, from 0.
        names: The encoder's names for the linear layers of its feed-forward part.
    """
    prefix = f"layers.{index}"
    if names.up_has_bias:
        up = LinearLayer(*load_affine(read_tensor, f"{prefix}.{names.up}"))
    else:
        up = LinearLayer(read_tensor(f"{prefix}.{names.up}.weight").contiguous(), None)
    return Layer(
        attn_norm=load_affine(read_tensor, f"{prefix}.attn_norm"),
        qkv=LinearLayer(*load_affine(read_tensor, f"{prefix}.qkv")),
        out=LinearLayer(*load_affine(read_tensor, f"{prefix}.out")),
        ffn_norm=load_affine(read_tensor, f"{prefix}.ffn_norm"),
        up=up,
        down=LinearLayer(*load_affine(read_tensor, f"{prefix}.{names.down}")),
    )


class Encoder(ABC):
    """A network that turns packed tokens into one vector for each row, on one device."""

    INFO: ClassVar[EncoderInfo]  # its entry in the registry
    FEED_FORWARD: ClassVar[FeedForward]
    HAS_PLAIN_GELU: ClassVar[bool] = False  # GELU of a product, without a gate

    def __init__(
        self,
        shape: AnyEncoderShape,
        read_tensor: TensorReader,
        device: torch.device,
        *,
        precision: Resolved,
        attention: BackendName,
        calibration: Calibration | None = None,
        gelu: Gelu = "exact",
        int8_kernels: Int8Kernels = "auto",
    ) -> None:
        """Load the weights to a device, converted to the format in which the network runs.

        Args:
            shape: Sizes of the network.
            read_tensor: Returns a tensor of the model when it is given our name for the tensor.
            device: Where the network runs.
            precision: Number format in which the network runs.
            attention: Which implementation runs its layers: our kernels ("fused") or plain torch
                operations ("reference").
            calibration: For int8, the statistics of the inputs of its linear layers, layer by
                layer. None: no layer computes in int8.
            gelu: Form of the activation: exact, or its approximation by tanh. Only for encoders
                with `HAS_PLAIN_GELU`.
            int8_kernels: What rounds rows to int8: the library for Hopper GPUs ("hopper"), Triton
                ("triton"), or the library if it runs on the device ("auto").

        Raises:
            IncapableError: The library was asked for, and cannot run on the device.
        """
        self.shape = shape
        self.width = shape.width
        self.precision: Resolved = precision
        self.attention: BackendName = attention
        self.gelu: Gelu = gelu
        # Calibration for int8 replaces this function by one that also records the inputs.
        self.apply_linear = apply_linear
        self._backend = load_backend(attention)
        self.rows_library: HopperLibrary | None = None  # what rounds rows to int8; None: Triton
        if precision == "int8" and self._backend.has_kernels:
            self.rows_library = choose_library(int8_kernels, device)
        # Outputs of the first layer's `qkv`, [vocab, 3 * width], by the token slots of a batch
        self._qkv_tables: dict[int, Tensor] = {}
        dtype = DTYPES[precision]

        def load_to_device(name: str) -> Tensor:
            """Return a tensor on the device, in the format in which it is stored."""
            tensor = read_tensor(name)
            is_copied = device.type == "cuda" and tensor.device.type == "cpu"
            if is_copied:  # copying from page-locked memory is several times as fast
                return tensor.pin_memory().to(device, non_blocking=True)
            return tensor.to(device)

        def load_float32(name: str) -> Tensor:
            """Return a tensor on the device in float32."""
            return load_to_device(name).float()

        def load_converted(name: str) -> Tensor:
            """Return a tensor on the device in the format in which the network runs."""
            return load_to_device(name).to(dtype)

        layers = []
        for index in range(shape.layers):
            if calibration is None:
                layer = load_layer(load_converted, index, self.FEED_FORWARD)
            else:  # int8 weights are computed from those in float32
                float32_layer = load_layer(load_float32, index, self.FEED_FORWARD)
                layer = quantise_layer(float32_layer, calibration[index], dtype)
            layers.append(layer)
        self.layers = tuple(layers)
        self._load_outer_tensors(load_float32, load_converted)

    @abstractmethod
    def _load_outer_tensors(self, load_float32: TensorReader, load_converted: TensorReader) -> None:
        """Load the weights outside the transformer layers, such as the embedding table.

        Args:
            load_float32: Returns a tensor in float32 when it is given our name for the tensor.
            load_converted: The same in the format in which the network runs.
        """

    def embed(self, batch: PackedBatch) -> Tensor:
        """Return the embedding of each sequence of a batch.

        The embedding is the mean of the last layer's output over the sequence's tokens. It depends
        only on the sequence, the weights, the precision and the number of token slots of the batch,
        not on the other sequences. The call does not wait for the device.

        Returns:
            float32 [row_capacity, width], where `row_capacity` is the largest number of rows that a
            batch can have. Rows past `batch.rows` are zero.
        """
        with torch.inference_mode():
            hidden_states = self.compute_hidden_states(batch)
            starts, ends = self.pooled_spans(batch.cu_seqlens)
            return self._backend.mean(hidden_states, starts, ends)

    def _add_product(self, stream: Tensor, x: Tensor, layer: LinearLayer) -> Tensor:
        """Add the output of a linear layer to the residual stream, and return the sum.

        The residual stream is what the layers of a network hand on: each layer adds to it. On a GPU
        with our kernels, `stream` is changed in place, which saves a pass over memory, and the bias
        of the linear layer is left out. The norms that follow add it when they read the stream.

        Args:
            stream: The residual stream, [slots, width].
            x: Input of the linear layer, [slots, in].
            layer: The linear layer.
        """
        if self._backend.has_kernels:
            return stream.addmm_(x, layer.weight.t())  # stream += x @ weight.T
        return stream + self.apply_linear(x, layer)

    def _first_qkv(self, tokens: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the queries, keys and values of the first layer, [slots, 3 * width].

        They depend on the token of a slot alone, because attention comes after them. So with the
        kernels they are computed once for each token of the vocabulary, and then looked up. This
        gives the same bits.

        Args:
            tokens: The tokens of a batch, [slots].
            compute: Returns the queries, keys and values for given tokens, [slots].
        """
        if not self._backend.has_kernels:
            return compute(tokens)
        slots = len(tokens)
        if slots not in self._qkv_tables:
            # The size of a matrix decides by which kernel it is multiplied, and so the last bits.
            # Therefore each batch here has exactly `slots` tokens, and each size its own table.
            vocab = self.shape.vocab
            n_batches = -(-vocab // slots)  # rounded up
            all_tokens = torch.arange(n_batches * slots, device=tokens.device) % vocab
            parts = [compute(batch) for batch in all_tokens.split(slots)]
            self._qkv_tables[slots] = torch.cat(parts)[:vocab].clone()
        return F.embedding(tokens, self._qkv_tables[slots])

    @abstractmethod
    def compute_hidden_states(self, batch: PackedBatch) -> Tensor:
        """Return the output of the last layer for each token slot, [slots, width]."""

    @abstractmethod
    def pooled_spans(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Return which token slots of each sequence are averaged to its embedding.

        Args:
            cu_seqlens: First slot of each sequence, then the end, int32 [row_capacity + 1].

        Returns:
            The first slot, and the slot after the last one, int32 [row_capacity] each.
        """
