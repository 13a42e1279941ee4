"""Files of a models directory written: weights as safetensors, and the folder of one part."""

import errno
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from virnuc_core.encoders.checkpoint import WEIGHTS
from virnuc_core.encoders.layers import TensorReader
from virnuc_core.encoders.model_config import CONFIG, Shape, Storage, write_shape
from virnuc_core.encoders.precision import DTYPES
from virnuc_core.errors import WeightsError
from virnuc_core.rundir import atomic_file
from virnuc_core.system_errors import path_exists

TOKENIZER: Final = "tokenizer.json"
SAFETENSORS_NAMES: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
HEADER_MULTIPLE: Final = 8  # a safetensors header is padded to a multiple of so many bytes


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, read_tensor: TensorReader
) -> None:
    """Write a safetensors file atomically, with one tensor in memory at a time.

    The safetensors library would need all tensors in memory. The format is simple: eight bytes with
    the length of the header, the header in JSON, then the numbers of all tensors.

    Args:
        path: The file.
        shapes: Name and shape of each tensor, in the order in which they are written.
        dtype: Format in which they are stored. Only the rotary frequencies `inv_freq` are always
            stored in float32, because half precision is too inexact for them.
        read_tensor: Returns a tensor of any floating type, given its name.
    """
    dtypes = {name: torch.float32 if name == "inv_freq" else dtype for name in shapes}

    # The header says where the numbers of each tensor begin and end.
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
    header_json = json.dumps(header, separators=(",", ":")).encode()
    padded_size = math.ceil(len(header_json) / HEADER_MULTIPLE) * HEADER_MULTIPLE
    header_json = header_json.ljust(padded_size)  # with spaces

    with atomic_file(path) as temp_path, temp_path.open("wb") as file:
        length_field = len(header_json).to_bytes(8, "little")
        file.write(length_field + header_json)
        for name in shapes:
            tensor = read_tensor(name).to("cpu", dtypes[name]).contiguous()
            # NumPy has no bfloat16, so the numbers are written as plain bytes.
            file.write(tensor.view(torch.uint8).reshape(-1).numpy().data)


def write_part(
    out: Path,
    shape: Shape,
    read_tensor: TensorReader,
    origin: str,
    dtype: Storage | None,
    tokenizer: bytes | None = None,
) -> None:
    """Write one model, an encoder or the classifier, to its folder in a models directory.

    The folder appears only when all its files are complete. The directory is created if needed.

    Args:
        out: Models directory.
        shape: Sizes of the model. They also tell the name of the folder.
        read_tensor: Returns a tensor when it is given our name for the tensor.
        origin: Where the weights come from, for the user. It is written to `config.json`.
        dtype: Format in which the weights are stored; None: the format of the first tensor.
        tokenizer: Content of `tokenizer.json`; None: the model has no such file.

    Raises:
        WeightsError: The folder exists already.
    """
    target = out / shape.model
    if path_exists(target):
        raise _existing_part_error(target)
    if dtype is None:
        first_name = next(iter(shape.tensors()))
        stored_dtype = read_tensor(first_name).dtype
    else:
        stored_dtype = DTYPES[dtype]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=out) as folder:
        temp_folder = Path(folder, shape.model)
        write_tensors(temp_folder / WEIGHTS, shape.tensors(), stored_dtype, read_tensor)
        write_shape(shape.model_copy(update={"origin": origin}), temp_folder / CONFIG)
        if tokenizer is not None:
            (temp_folder / TOKENIZER).write_bytes(tokenizer)
        try:
            temp_folder.rename(target)
        except OSError as error:
            # Another process has made the folder meanwhile, for instance by installing a head.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            raise _existing_part_error(target) from error


def _existing_part_error(folder: Path) -> WeightsError:
    """Return the error for a model that is to be written where there is one already."""
    return WeightsError(f"{folder}: exists already; remove it or choose another directory")
