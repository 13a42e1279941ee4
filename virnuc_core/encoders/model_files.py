"""Files of a models directory written: weights as safetensors, and the folder of one part."""

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from virnuc_core.encoders.checkpoint import WEIGHTS
from virnuc_core.encoders.layers import Read
from virnuc_core.encoders.model_config import CONFIG, Shape, Storage, write_shape
from virnuc_core.encoders.precision import DTYPES
from virnuc_core.errors import WeightsError
from virnuc_core.rundir import atomic_file

TOKENIZER: Final = "tokenizer.json"
SAFETENSORS_NAMES: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
HEADER_MULTIPLE: Final = 8  # bytes


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, read: Read
) -> None:
    """Write a safetensors file whole, one tensor at a time: the library wants all in memory.

    Args:
        path: The file.
        shapes: Name and shape of each tensor, in order.
        dtype: Format in which they are stored. Rotary frequencies lose their meaning in half
            precision, so they are stored in float32.
        read: Reads a tensor of any floating type by its name.
    """
    dtypes = {name: torch.float32 if name == "inv_freq" else dtype for name in shapes}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + math.prod(shape) * dtypes[name].itemsize
        header[name] = {
            "dtype": SAFETENSORS_NAMES[dtypes[name]],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(math.ceil(len(text) / HEADER_MULTIPLE) * HEADER_MULTIPLE)
    with atomic_file(path) as temp_path, temp_path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            tensor = read(name).to("cpu", dtypes[name]).contiguous()
            file.write(tensor.view(torch.uint8).reshape(-1).numpy().data)


def write_part(
    out: Path,
    shape: Shape,
    read: Read,
    origin: str,
    dtype: Storage | None,
    tokenizer: bytes | None = None,
) -> None:
    """Write one part of a models directory, whole or not at all.

    Args:
        out: Models directory.
        shape: Sizes of the model.
        read: Reads a tensor by our name.
        origin: Where the weights come from.
        dtype: Format in which they are stored; None: that of the first tensor.
        tokenizer: Content of `tokenizer.json`.

    Raises:
        WeightsError: The part is there already.
    """
    target = out / shape.model
    if target.exists():
        raise WeightsError(f"{target}: exists already; remove it or choose another directory")
    if dtype is None:
        first_name = next(iter(shape.tensors()))
        stored_dtype = read(first_name).dtype
    else:
        stored_dtype = DTYPES[dtype]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=out) as folder:
        partial = Path(folder, shape.model)
        write_tensors(partial / WEIGHTS, shape.tensors(), stored_dtype, read)
        write_shape(shape.model_copy(update={"origin": origin}), partial / CONFIG)
        if tokenizer is not None:
            (partial / TOKENIZER).write_bytes(tokenizer)
        partial.rename(target)
