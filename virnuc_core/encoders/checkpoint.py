"""A models directory opened, checked, and loaded to a device.

torch takes seconds to import. It is imported by the functions that load tensors, so processes that
only check a models directory do without.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from safetensors import safe_open

from virnuc_core.config import Attention, EngineSpec, Precision, read_small_text
from virnuc_core.encoders.model_config import CONFIG, HeadShape, S, Shape, read_shape
from virnuc_core.encoders.registry import (
    DNA_ENCODER,
    ENCODERS,
    HEAD,
    PARTS,
    PROTEIN_ENCODER,
    EncoderInfo,
    EncoderName,
    embedding_columns,
    encoder_named,
)
from virnuc_core.encoders.tensor_names import TensorHeader, match_tensors
from virnuc_core.errors import WeightsError

if TYPE_CHECKING:
    import torch

    from virnuc_core.encoders.classifier import Head
    from virnuc_core.encoders.layers import Encoder, Read

E = TypeVar("E", bound="Encoder")
WEIGHTS: Final = "model.safetensors"
OpenFile = Callable[[Path], Mapping[str, Any]]  # opens a .safetensors file: its tensors by name


def open_part(models: Path, kind: type[S]) -> tuple[S, Read]:
    """Open one part of a models directory.

    Args:
        models: Models directory.
        kind: The type of its sizes, which says which part it is.

    Returns:
        Its sizes, and a function that reads a tensor by our name.

    Raises:
        WeightsError: The part is missing, or does not fit its sizes, its tokenizer or the other
            parts.
    """
    shape_of(models, kind)
    return open_folder(models / kind.part(), kind)


def shape_of(models: Path, kind: type[S]) -> S:
    """Return the sizes of one part of a models directory, checked as `open_part` checks them.

    The check is made once in this process while the files stay the same.
    """
    states = []
    for path in sorted(models.glob("*/*")):
        if path.is_file():
            status = path.stat()
            states.append((status.st_ino, status.st_size, status.st_mtime_ns))
    shape: S = _checked_shape(models, kind, tuple(states))
    return shape


@functools.cache
def _checked_shape(models: Path, kind: type[Any], _states: object) -> Any:
    """Read the sizes of one part and check all that is known without an encoder's numbers."""
    shape = read_shape(part_folder(models, kind.part()) / CONFIG, kind)
    if isinstance(shape, HeadShape):
        check_widths(models, shape)
        _open_tensors(models / shape.model, shape, _load_arrays)
        return shape
    _open_tensors(models / shape.model, shape, _read_headers)
    tokenizer = encoder_named(shape.model).open_tokenizer(models)
    if tokenizer.vocab > shape.vocab:
        raise WeightsError(
            f"{models / shape.model}: the tokenizer has {tokenizer.vocab} tokens, "
            f"the model only {shape.vocab}"
        )
    return shape


def open_folder(folder: Path, kind: type[S]) -> tuple[S, Read]:
    """Open a part wherever its folder lies. Whether it fits other parts is not checked.

    Args:
        folder: A folder with `config.json` and weights.
        kind: The type of its sizes.

    Returns:
        Its sizes, and a function that reads a tensor by our name.

    Raises:
        WeightsError: The folder holds no such part, or its tensors do not fit its sizes.
    """
    if not (folder / CONFIG).is_file():
        raise WeightsError(
            f"{folder}: no {kind.part()} here; it needs config.json and model.safetensors"
        )
    from safetensors.torch import load_file

    shape = read_shape(folder / CONFIG, kind)
    return shape, _open_tensors(folder, shape, load_file)


def _open_tensors(folder: Path, shape: Shape, open_file: OpenFile) -> Read:
    """Find the tensors of a part; of a classifier, which is small, the numbers are checked, too."""
    tensors = open_safetensors(weight_files(folder), open_file)
    read_tensor = match_tensors(folder, tensors, shape)
    if isinstance(shape, HeadShape):
        check_finite(folder, shape, read_tensor)
    return read_tensor


def _read_headers(path: Path) -> dict[str, TensorHeader]:
    """Return what a .safetensors file says about its tensors."""
    headers = {}
    with safe_open(path, "np") as file:
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            tensor = file.get_slice(name)
            headers[name] = TensorHeader(tuple(tensor.get_shape()), tensor.get_dtype())
    return headers


def _load_arrays(path: Path) -> Mapping[str, Any]:
    """Load a .safetensors file as NumPy arrays; with bfloat16, which NumPy lacks, as tensors."""
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except TypeError:
        from safetensors import torch

        return torch.load_file(path)


def check_widths(models: Path, head: HeadShape) -> None:
    """Check that a classifier takes what the encoders of a models directory give.

    Raises:
        WeightsError: It was made for embeddings of other widths.
    """
    widths = {}
    for encoder in ENCODERS:
        folder = part_folder(models, encoder.name)
        widths[encoder.name] = read_shape(folder / CONFIG, encoder.shape_type).width
    if any(encoder.width_in(head) != widths[encoder.name] for encoder in ENCODERS):
        wanted_widths = " + ".join(
            f"{encoder.width_in(head)} ({_molecule_text(encoder)})" for encoder in ENCODERS
        )
        given_widths = " + ".join(str(widths[encoder.name]) for encoder in ENCODERS)
        raise WeightsError(
            f"{models / HEAD}: made for embeddings of {wanted_widths}, the encoders beside it give "
            f"{given_widths}; use the head that belongs to them"
        )


def _molecule_text(encoder: EncoderInfo) -> str:
    return "DNA" if encoder.molecule == "dna" else encoder.molecule


def check_finite(folder: Path, shape: Shape, read: Read) -> int:
    """Check that all numbers of a part are finite, and return how many there are.

    Raises:
        WeightsError: Names the first tensor with NaN or infinity.
    """
    n_numbers = 0
    for name, tensor_shape in shape.tensors().items():
        values = read(name)
        if not bool((abs(values) < math.inf).all()):
            raise WeightsError(
                f"{folder}: tensor {name} holds NaN or infinity; make it anew, or copy it again"
            )
        n_numbers += math.prod(tensor_shape)
    return n_numbers


def check_models(models: Path, new_length: int | None = None) -> HeadShape:
    """Check all of a models directory that can be checked without an encoder's numbers.

    Args:
        models: Models directory.
        new_length: A classifier for this model length is yet to be made, so none is needed.

    Returns:
        The sizes of the classifier.

    Raises:
        WeightsError: A part is missing, or does not fit the others.
    """
    protein_width = shape_of(models, PROTEIN_ENCODER.shape_type).width
    dna_width = shape_of(models, DNA_ENCODER.shape_type).width
    if new_length is not None:
        return HeadShape(model_length=new_length, dna_width=dna_width, protein_width=protein_width)
    return shape_of(models, HeadShape)


def part_folder(models: Path, part: str) -> Path:
    """Return the folder of a part of a models directory.

    Raises:
        WeightsError: There is no such directory, or no such part in it.
    """
    if not models.is_dir():
        raise WeightsError(
            f"models directory {models}: no such directory; make one with virnuc models"
        )
    if not (models / part).is_dir():
        needed_folders = ", ".join(f"{name}/" for name in PARTS)
        way_out = ""
        if part == HEAD:
            way_out = (
                "; virnuc models use-head puts one back, virnuc train --model-length makes one"
            )
        raise WeightsError(
            f"models directory {models}: no {part}/ in it; it needs {needed_folders}{way_out}"
        )
    return models / part


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights of a part.

    Raises:
        WeightsError: There are none.
    """
    files = tensor_files(folder)
    if not files:
        raise WeightsError(
            f"{folder / WEIGHTS}: no such file; convert a checkpoint with virnuc models convert"
        )
    return files


def tensor_files(folder: Path, name: str = WEIGHTS) -> list[Path]:
    """Return the file of this name in a folder, or the shards that its index names.

    Returns:
        The files; an empty list if neither is there.

    Raises:
        WeightsError: The index cannot be read, or names a file that is not in the folder.
    """
    single_file, index = folder / name, folder / f"{name}.index.json"
    if single_file.is_file():
        return [single_file]
    if not index.is_file():
        return []
    try:
        weight_map = json.loads(read_small_text(index))["weight_map"]
        names = sorted({str(shard) for shard in weight_map.values()})
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index}: not an index of the shards of a checkpoint") from error
    for shard in names:
        has_folder = Path(shard).name != shard
        if has_folder or not (folder / shard).is_file():
            raise WeightsError(f"{index}: names {shard}, which is not in {folder}")
    return [folder / shard for shard in names]


def open_safetensors(files: list[Path], open_file: OpenFile) -> dict[str, Any]:
    """Open several .safetensors files.

    Args:
        files: The files.
        open_file: What opens one. torch's `load_file` maps it into memory: a tensor's numbers are
            read when they are used.

    Returns:
        All tensors by their names.

    Raises:
        WeightsError: A file cannot be read.
    """
    tensors: dict[str, Any] = {}
    for path in files:
        try:
            tensors |= open_file(path)
        except Exception as error:  # the library, and torch for it, raise many kinds
            raise WeightsError(
                f"{path}: cannot be read as safetensors: {error}; "
                "is it whole? copy or convert it again"
            ) from error
    return tensors


def load_encoder(
    network: type[E],
    models: Path,
    device: torch.device,
    precision: Precision = "auto",
    attention: Attention = "auto",
) -> E:
    """Load an encoder of a models directory to a device.

    Args:
        network: The class of the encoder, `Esm2` or `DnabertS`.
        models: Models directory.
        device: Where the encoder runs.
        precision: Number format. With int8, encoders that have no int8 run in fp16.
        attention: Which implementation runs the layers.

    Raises:
        WeightsError: The weights, or the calibration for int8, cannot be used.
        IncapableError: The device cannot run what is asked for.
        ConfigError: The model's sizes do not allow what is asked for.
    """
    from virnuc_core.encoders.backends import choose_backend
    from virnuc_core.encoders.calibration import read_calibration
    from virnuc_core.encoders.layers import as_calibration
    from virnuc_core.encoders.precision import resolve_precision

    encoder = network.INFO
    shape, read_tensor = open_part(models, encoder.shape_type)
    if precision == "int8" and not encoder.has_int8:
        precision = "fp16"
    resolved_precision = resolve_precision(precision, device)
    backend = choose_backend(attention, shape.head_dim, device)
    inputs = None
    if resolved_precision == "int8":
        inputs = as_calibration(read_calibration(models, encoder).layers)
    return network(
        shape,
        read_tensor,
        device,
        precision=resolved_precision,
        attention=backend,
        calibration=inputs,
    )


@dataclass(frozen=True)
class LoadedModels:
    """The encoders and the classifier, ready to run on one device."""

    encoders: Mapping[EncoderName, Encoder]  # in the registry's order
    head: Head

    def columns(self) -> dict[EncoderName, slice]:
        """Return the columns of the joined embeddings that each encoder fills."""
        widths = {name: encoder.width for name, encoder in self.encoders.items()}
        return embedding_columns(widths)


def load_models(
    models: Path,
    device: torch.device,
    engine: EngineSpec,
    warm: Callable[[Encoder], object] = lambda _: None,
) -> LoadedModels:
    """Load all encoders and the classifier to one device, the encoders at the same time.

    Args:
        models: Models directory.
        device: Where the models run.
        engine: Settings: precision and attention backend.
        warm: Called with each encoder as soon as it is loaded, because compiling its kernels takes
            longest. Called again after all are loaded for an encoder for which there was not
            enough memory while another one was still loading.

    Raises:
        WeightsError: A part of the models directory cannot be used.
        IncapableError: The device cannot run what the settings ask for.
        ConfigError: The settings do not fit the models.
    """
    import torch

    from virnuc_core.encoders.classifier import Head
    from virnuc_core.encoders.models import NETWORKS

    out_of_memory: list[Encoder] = []

    def load(info: EncoderInfo) -> Encoder:
        network = NETWORKS[info.name]
        encoder = load_encoder(network, models, device, engine.precision, engine.attention)
        try:
            warm(encoder)
        except torch.OutOfMemoryError:
            out_of_memory.append(encoder)
        return encoder

    with ThreadPoolExecutor(len(ENCODERS)) as threads:
        # The last one of the registry is the largest, so its loading starts first.
        loading = {info.name: threads.submit(load, info) for info in reversed(ENCODERS)}
    networks = {name: future.result() for name, future in loading.items()}
    encoders = {info.name: networks[info.name] for info in ENCODERS}
    head = Head(*open_part(models, HeadShape), device)
    for encoder in out_of_memory:
        warm(encoder)
    return LoadedModels(encoders, head)
