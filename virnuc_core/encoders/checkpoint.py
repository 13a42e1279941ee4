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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from safetensors import safe_open

from virnuc_core.config import (
    Attention,
    EngineSpec,
    Gelu,
    Int8Kernels,
    Precision,
    gelu_problem,
    read_small_text,
)
from virnuc_core.encoder_names import EncoderName
from virnuc_core.encoders.model_config import CONFIG, HeadShape, S, Shape, read_shape
from virnuc_core.encoders.registry import (
    DNA_ENCODER,
    ENCODERS,
    HEAD,
    PART_SHAPES,
    PARTS,
    PROTEIN_ENCODER,
    EncoderInfo,
    embedding_columns,
    encoder_named,
)
from virnuc_core.encoders.tensor_names import MERGE_ADVICE, TensorHeader, match_tensors
from virnuc_core.errors import ConfigError, WeightsError
from virnuc_core.system_errors import (
    is_folder,
    is_regular_file,
    list_folder,
    read_with_retries,
    require_readable,
)

if TYPE_CHECKING:
    import torch

    from virnuc_core.encoders.classifier import Head
    from virnuc_core.encoders.layers import Encoder, TensorReader

E = TypeVar("E", bound="Encoder")
WEIGHTS: Final = "model.safetensors"
# Files of an adapter, as peft saves them
ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
FREQUENCIES: Final = "inv_freq"  # what the names of rotary frequencies end with
MAX_FREQUENCIES: Final = 1 << 16  # half the width of a head is far less
OpenFile = Callable[[Path], Mapping[str, Any]]  # opens a .safetensors file: its tensors by name


def open_part(models: Path, shape_type: type[S]) -> tuple[S, TensorReader]:
    """Check and open one model of a models directory: an encoder or the classifier.

    Args:
        models: Models directory.
        shape_type: The type of the model's sizes. It decides which model is opened.

    Returns:
        The sizes of the model, and a function that returns a tensor when it is given our name for
        the tensor. Weights are mapped into memory and read when they are used.

    Raises:
        WeightsError: The model is missing, or its tensors do not fit its sizes, its tokenizer or
            the other models.
    """
    shape_of(models, shape_type)
    return open_folder(models / shape_type.part(), shape_type)


def shape_of(models: Path, shape_type: type[S]) -> S:
    """Return the sizes of one model of a models directory, after a check of the model.

    Its tensors must fit its sizes, its tokenizer and the other models. The result is remembered in
    this process. The check is made again if a file of the models directory has changed.

    Args:
        models: Models directory.
        shape_type: The type of the model's sizes. It decides which model is checked.

    Raises:
        WeightsError: The model is missing, or does not fit.
        UnreadableError: The system cannot list the directory or look at a file in it.
    """
    file_states = []
    for folder in list_folder(models):
        if not is_folder(folder):
            continue
        for path in list_folder(folder):
            if is_regular_file(path):
                status = read_with_retries(path, path.stat)
                file_states.append((status.st_ino, status.st_size, status.st_mtime_ns))
    shape: S = _checked_shape(models, shape_type, tuple(file_states))
    return shape


@functools.cache
def _checked_shape(models: Path, shape_type: type[Any], _file_states: object) -> Any:
    """Read `config.json` of one model, and check that its files belong together.

    The weights of an encoder take gigabytes, so only the names, shapes and formats of its tensors
    are checked. A classifier is small, so its weights are read and checked, too.

    Args:
        models: Models directory.
        shape_type: The type of the content of `config.json`: number of layers, width and so on.
        _file_states: State of all files. It is only part of the key under which the result is
            cached: another state leads to a new check.
    """
    shape = read_shape(part_folder(models, shape_type.part()) / CONFIG, shape_type)
    if isinstance(shape, HeadShape):
        check_widths(models, shape)
        _open_tensors(models / shape.model, shape, _load_arrays)
        return shape

    _open_tensors(models / shape.model, shape, _read_headers)
    tokenizer = encoder_named(shape.model).open_tokenizer(models)
    # A token beyond the embedding table would have no row in it.
    if tokenizer.vocab > shape.vocab:
        raise WeightsError(
            f"{models / shape.model}: the tokenizer has {tokenizer.vocab} tokens, "
            f"the model only {shape.vocab}"
        )
    return shape


def open_folder(folder: Path, shape_type: type[S]) -> tuple[S, TensorReader]:
    """Open a model in any folder, without a check that it fits the other models of a directory.

    Args:
        folder: A folder with `config.json` and weights.
        shape_type: The type of the model's sizes.

    Returns:
        The sizes of the model, and a function that returns a tensor when it is given our name for
        the tensor.

    Raises:
        WeightsError: The folder holds no such model, or its tensors do not fit its sizes.
    """
    if not is_regular_file(folder / CONFIG):
        raise WeightsError(
            f"{folder}: no {shape_type.part()} here; it needs config.json and model.safetensors"
        )
    from safetensors.torch import load_file

    shape = read_shape(folder / CONFIG, shape_type)
    return shape, _open_tensors(folder, shape, load_file)


def _open_tensors(folder: Path, shape: Shape, open_file: OpenFile) -> TensorReader:
    """Open the weights of a model, and check the names, shapes and formats of all its tensors.

    A classifier is small, so this also checks that all its numbers are finite.

    Args:
        folder: Folder of the model.
        shape: Sizes of the model.
        open_file: Opens one .safetensors file: complete, or only its header.

    Returns:
        A function that returns a tensor when it is given our name for the tensor.

    Raises:
        WeightsError: A tensor is missing, unexpected or of another shape, or not finite.
    """
    tensors = open_safetensors(weight_files(folder), open_file)
    read_tensor = match_tensors(folder, tensors, shape)
    if isinstance(shape, HeadShape):
        check_finite(folder, shape, read_tensor)
    return read_tensor


def _read_headers(path: Path) -> dict[str, Any]:
    """Return shape and number format of each tensor in a .safetensors file, by its name.

    Only the numbers of rotary frequencies are read, because a later check compares those of all
    layers, which must be the same. So this takes milliseconds for a file of any size.

    Returns:
        A `TensorHeader` for each tensor; the tensor itself for rotary frequencies.
    """
    headers: dict[str, Any] = {}
    with safe_open(path, "np") as file:
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            tensor = file.get_slice(name)
            headers[name] = TensorHeader(tuple(tensor.get_shape()), tensor.get_dtype())
            # A larger tensor of this name is no list of frequencies, and is refused later.
            is_small = math.prod(headers[name].shape) <= MAX_FREQUENCIES
            if name.endswith(FREQUENCIES) and is_small:
                with suppress(TypeError):  # NumPy has no such format: the header is enough then
                    headers[name] = file.get_tensor(name)
    return headers


def _load_arrays(path: Path) -> Mapping[str, Any]:
    """Load all tensors of a .safetensors file as NumPy arrays, by their names.

    NumPy is enough for most files, and torch takes seconds to import. But NumPy has no bfloat16: a
    file with such tensors is loaded as torch tensors.
    """
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except TypeError:  # a number format that NumPy does not have
        from safetensors import torch

        return torch.load_file(path)


def check_widths(models: Path, head: HeadShape) -> None:
    """Check that a classifier was made for embeddings as wide as those of the encoders.

    Args:
        models: Models directory, which holds the encoders.
        head: Sizes of the classifier.

    Raises:
        WeightsError: The classifier was made for embeddings of other widths.
    """
    widths = {}
    for encoder in ENCODERS:
        folder = part_folder(models, encoder.name)
        widths[encoder.name] = read_shape(folder / CONFIG, encoder.shape_type).width

    if any(encoder.width_in(head) != widths[encoder.name] for encoder in ENCODERS):
        expected_widths = " + ".join(
            f"{encoder.width_in(head)} ({_molecule_text(encoder)})" for encoder in ENCODERS
        )
        actual_widths = " + ".join(str(widths[encoder.name]) for encoder in ENCODERS)
        raise WeightsError(
            f"{models / HEAD}: made for embeddings of {expected_widths}, the encoders beside it "
            f"give {actual_widths}; use the head that belongs to them"
        )


def _molecule_text(encoder: EncoderInfo) -> str:
    """Return the molecule that an encoder reads, as messages spell it: "DNA" or "protein"."""
    return "DNA" if encoder.molecule == "dna" else encoder.molecule


def check_finite(folder: Path, shape: Shape, read_tensor: TensorReader) -> int:
    """Check that all numbers of a model are finite.

    Args:
        folder: Folder of the model, for messages.
        shape: Sizes of the model.
        read_tensor: Returns a tensor when it is given our name for the tensor.

    Returns:
        How many numbers the model has.

    Raises:
        WeightsError: A tensor holds NaN or infinity. The message names the first such tensor.
    """
    n_numbers = 0
    for name, tensor_shape in shape.tensors().items():
        values = read_tensor(name)
        # Comparisons with NaN are false, so this finds NaN as well as infinity.
        if not bool((abs(values) < math.inf).all()):
            raise WeightsError(
                f"{folder}: tensor {name} holds NaN or infinity; make it anew, or copy it again"
            )
        n_numbers += math.prod(tensor_shape)
    return n_numbers


def check_models(models: Path, new_length: int | None = None) -> HeadShape:
    """Check that a models directory is complete and that its models fit each other.

    The numbers of the encoders are not read, because they take gigabytes.

    Args:
        models: Models directory.
        new_length: Bases of a chunk of a classifier that is going to be trained. With it, the
            directory needs no classifier yet.

    Returns:
        The sizes of the classifier; with `new_length`, of the classifier to be trained.

    Raises:
        WeightsError: A model is missing, or does not fit the others.
    """
    protein_width = shape_of(models, PROTEIN_ENCODER.shape_type).width
    dna_width = shape_of(models, DNA_ENCODER.shape_type).width
    if new_length is not None:
        return HeadShape(model_length=new_length, dna_width=dna_width, protein_width=protein_width)
    return shape_of(models, HeadShape)


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """What a models directory says about its weights.

    Attributes:
        origins: Where the weights of each model come from, by its folder.
        has_card: Whether the classifier has a card with the result of a test.
    """

    origins: dict[str, str]
    has_card: bool


def weight_facts(models: Path) -> WeightFacts:
    """Return where the weights of a models directory come from, and whether they are tested.

    Args:
        models: Models directory.

    Raises:
        WeightsError: A model is missing, or does not fit the others.
    """
    origins = {part: shape_of(models, kind).origin for part, kind in PART_SHAPES.items()}
    return WeightFacts(origins, has_card=shape_of(models, HeadShape).card is not None)


def part_folder(models: Path, part: str) -> Path:
    """Return the folder of one model in a models directory, after checking that it exists.

    Args:
        models: Models directory.
        part: Name of the model: that of an encoder, or `head` for the classifier.

    Raises:
        WeightsError: The models directory or the folder does not exist.
    """
    if not is_folder(models):
        raise WeightsError(
            f"models directory {models}: no such directory; make one with virnuc models fetch "
            f"{models} --head 300_model.pth, or to try things out with virnuc models init-random "
            f"{models}"
        )
    if not is_folder(models / part):
        needed_folders = ", ".join(f"{name}/" for name in PARTS)
        way_out = "; virnuc models fetch or virnuc models convert makes them"
        if part == HEAD:
            way_out = (
                "; virnuc models use-head puts one back, virnuc train --model-length makes one"
            )
        raise WeightsError(
            f"models directory {models}: no {part}/ in it; it needs {needed_folders}{way_out}"
        )
    return models / part


def weight_files(folder: Path) -> list[Path]:
    """Return the .safetensors files that hold a model's weights, one or several.

    Raises:
        WeightsError: The folder holds no weights.
    """
    files = tensor_files(folder)
    if not files:
        raise WeightsError(
            f"{folder / WEIGHTS}: no such file; convert a checkpoint with virnuc models convert"
        )
    return files


def tensor_files(folder: Path, name: str = WEIGHTS) -> list[Path]:
    """Find the weights in a folder: one file, or the shards listed in an index file.

    transformers splits large checkpoints into shards. An index, for instance
    `model.safetensors.index.json`, says which shard holds which tensor.

    Args:
        folder: Folder of the checkpoint.
        name: Name of the single file.

    Returns:
        The single file, or the shards by name; an empty list if there is neither.

    Raises:
        WeightsError: The index cannot be read, or names a file that is not in the folder. Or the
            folder has an adapter, whose tuning the weights lack.
    """
    require_no_adapter(folder)
    single_file = folder / name
    index = folder / f"{name}.index.json"
    if is_regular_file(single_file):
        return [single_file]
    if not is_regular_file(index):
        return []
    try:
        text = read_with_retries(index, lambda: read_small_text(index))
        weight_map = json.loads(text)["weight_map"]
        names = sorted({str(shard) for shard in weight_map.values()})
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index}: not an index of the shards of a checkpoint") from error
    # The index comes from strangers, so it must not lead to files outside its folder.
    for shard in names:
        has_folder = Path(shard).name != shard
        if has_folder or not is_regular_file(folder / shard):
            raise WeightsError(f"{index}: names {shard}, which is not in {folder}")
    return [folder / shard for shard in names]


def require_no_adapter(folder: Path) -> None:
    """Refuse a folder with an adapter (such as LoRA) beside the weights.

    transformers would load both, and the embeddings would be those of the fine-tuned model. The
    weights alone give those of the model before it was tuned.

    Raises:
        WeightsError: There is an adapter.
    """
    for name in ADAPTER_FILES:
        if is_regular_file(folder / name):
            raise WeightsError(
                f"{folder / name}: an adapter (such as LoRA) that is not merged into the weights; "
                f"{MERGE_ADVICE}"
            )


def open_safetensors(files: list[Path], open_file: OpenFile) -> dict[str, Any]:
    """Open several .safetensors files, and return the tensors of all of them.

    Args:
        files: The files.
        open_file: A function that opens one file. torch's `load_file` maps the file into memory,
            so that a tensor's numbers are read only when they are used.

    Returns:
        The tensors by their names in the files.

    Raises:
        WeightsError: A file is damaged.
        UnreadableError: The system cannot read a file, so that nothing is known about it.
    """
    tensors: dict[str, Any] = {}
    for path in files:
        require_readable(path)
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
    gelu: Gelu = "exact",
    int8_kernels: Int8Kernels = "auto",
) -> E:
    """Load an encoder of a models directory to a device, ready to embed.

    Args:
        network: The class of the encoder, one of `models.NETWORKS`.
        models: Models directory.
        device: Where the encoder runs.
        precision: Number format. An encoder without int8 runs in fp16 if int8 is requested.
        attention: Which implementation runs the layers: auto, fused or reference.
        gelu: Form of the activation. An encoder without a plain GELU always has the exact one.
        int8_kernels: What rounds rows to int8: auto, hopper or triton.

    Raises:
        WeightsError: The weights, or the calibration for int8, cannot be used.
        IncapableError: The device cannot run the requested precision or implementation.
        ConfigError: The model's sizes do not allow the requested precision or implementation.
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
    if not network.HAS_PLAIN_GELU:
        gelu = "exact"
    problem = gelu_problem(gelu, resolved_precision, backend, device.type)
    if problem:
        raise ConfigError(problem)
    calibration = None
    if resolved_precision == "int8":
        calibration = as_calibration(read_calibration(models, encoder).layers)
    return network(
        shape,
        read_tensor,
        device,
        precision=resolved_precision,
        attention=backend,
        calibration=calibration,
        gelu=gelu,
        int8_kernels=int8_kernels,
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
    """Load all encoders and the classifier to one device. The encoders are loaded in parallel.

    Args:
        models: Models directory.
        device: Where the models run.
        engine: Settings: precision, attention backend and GELU.
        warm: A function that runs a first batch through an encoder, which compiles its kernels. It
            is called in the loading thread as soon as an encoder is loaded. If it runs out of
            memory, because another encoder is still being loaded, it is called again at the end.

    Raises:
        WeightsError: A part of the models directory cannot be used.
        IncapableError: The device cannot run the precision or implementation of the settings.
        ConfigError: The settings do not fit the models.
    """
    import torch

    from virnuc_core.encoders.classifier import Head
    from virnuc_core.encoders.models import NETWORKS

    out_of_memory: list[Encoder] = []

    def load(info: EncoderInfo) -> Encoder:
        """Load one encoder and warm it up. Note it if there was not enough memory to warm up."""
        network = NETWORKS[info.name]
        encoder = load_encoder(
            network,
            models,
            device,
            engine.precision,
            engine.attention,
            engine.gelu,
            engine.int8_kernels,
        )
        try:
            warm(encoder)
        except torch.OutOfMemoryError:
            out_of_memory.append(encoder)
        return encoder

    with ThreadPoolExecutor(len(ENCODERS)) as threads:
        # The last encoder of the registry is the largest, so its loading starts first.
        futures = {info.name: threads.submit(load, info) for info in reversed(ENCODERS)}
    # Results are taken in the order of loading: if several fail, the error of the largest counts.
    networks = {name: future.result() for name, future in futures.items()}
    encoders = {info.name: networks[info.name] for info in ENCODERS}
    head = Head(*open_part(models, HeadShape), device)
    # Nothing else is being loaded now. If memory is still too small, the error is raised.
    for encoder in out_of_memory:
        warm(encoder)
    return LoadedModels(encoders, head)
