"""Read the calibration for int8, which is stored beside an encoder's weights; compute its digest.

A calibration has statistics of the inputs of the encoder's linear layers.

The file is a safetensors file with texts as metadata: the digest of the weights, the number of
proteins, and the digest of the statistics. The safetensors library writes metadata in random order,
so files of older versions with the same content may have different bytes and different digests.
`canonical_bytes` puts the metadata in alphabetical order. Files are written like that, and digests
are computed from these bytes, also for older files.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from virnuc_core.encoders.model_config import CONFIG, PRODUCTS, read_shape
from virnuc_core.encoders.registry import PROTEIN_ENCODER, EncoderInfo
from virnuc_core.errors import WeightsError
from virnuc_core.system_errors import is_regular_file, require_readable

CALIBRATION: Final = "int8.safetensors"
METADATA: Final = "__metadata__"  # key of the metadata in the header of a safetensors file
STATISTICS_DIGEST: Final = "sha256"  # key in the metadata; files of older versions do not have it
METADATA_KEYS: Final = {"weights", "rows", STATISTICS_DIGEST}  # all that any version wrote
LENGTH_BYTES: Final = 8  # a safetensors file begins with the length of its header
MAX_METADATA_KEYS: Final = 4  # a calibration has three
# A mean is a float32 sum divided by a count. Because the sum is rounded, the mean of equal numbers
# may be slightly larger than the largest of them. This factor allows for it.
MEAN_TOLERANCE: Final = 1.01


@dataclass(frozen=True)
class StoredCalibration:
    """Statistics of the inputs of an encoder's linear layers, measured on some of the user's reads.

    Attributes:
        layers: For each layer, by the names in `PRODUCTS`: the largest absolute inputs and the mean
            inputs, float32 [2, in].
        weights: Digest of the encoder that was measured. The statistics hold for it alone.
    """

    layers: list[dict[str, NDArray[np.float32]]]
    weights: str


def read_calibration(models: Path, encoder: EncoderInfo = PROTEIN_ENCODER) -> StoredCalibration:
    """Read the int8 calibration that `virnuc models quantize` stored beside an encoder's weights.

    The calibration holds, for each linear layer of the encoder, the largest absolute and the mean
    value of each of its inputs. The int8 mode derives its scales from them.

    Args:
        models: Models directory.
        encoder: The encoder's entry in the registry.

    Raises:
        WeightsError: The file is missing or damaged, or belongs to an encoder of other sizes.
    """
    folder = models / encoder.name
    path = folder / CALIBRATION
    if not is_regular_file(path):
        raise WeightsError(
            f"{path}: no such file; int8 needs it, and virnuc models quantize makes it from some "
            "reads"
        )
    require_readable(path)
    try:
        with safe_open(path, "np") as file:
            statistics = {}
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                statistics[name] = file.get_tensor(name).astype(np.float32)
            metadata = file.metadata() or {}

        # A digest whose name was changed must not make the file look like an older one.
        if not set(metadata) <= METADATA_KEYS:
            raise ValueError("unknown metadata")

        # A missing layer or product raises KeyError, which is reported below.
        n_layers = read_shape(folder / CONFIG, encoder.shape_type).layers
        layers = []
        for i in range(n_layers):
            layers.append({name: statistics[f"layers.{i}.{name}"] for name in PRODUCTS})

        # Files of older versions have no digest of their statistics.
        recorded_digest = metadata.get(STATISTICS_DIGEST)
        if recorded_digest not in (None, statistics_digest(statistics)):
            raise ValueError("the statistics are not those that were written")
        # Each tensor is [2, in]: the largest absolute inputs, then the mean inputs. A mean cannot
        # be above the largest.
        for largest, mean in statistics.values():
            is_sound = np.isfinite(largest) & (np.abs(mean) <= MEAN_TOLERANCE * largest)
            if not is_sound.all():
                raise ValueError("no mean is above the largest")
        return StoredCalibration(layers, metadata["weights"])
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise WeightsError(
            f"{path}: is no calibration for this {encoder.title}; make it with virnuc models "
            "quantize"
        ) from error


def statistics_digest(statistics: Mapping[str, NDArray[np.float32]]) -> str:
    """Return the SHA-256 of the statistics of all linear layers, with their names and sizes.

    Args:
        statistics: By the name in the file, for instance `layers.0.qkv`: the largest absolute and
            the mean inputs, float32 [2, in].
    """
    content = hashlib.sha256()
    for name, values in sorted(statistics.items()):
        content.update(f"{name} {values.shape}\n".encode())
        little_endian = np.ascontiguousarray(values, "<f4")  # the same bytes on every machine
        content.update(little_endian.tobytes())
    return content.hexdigest()


def canonical_bytes(content: bytes) -> bytes:
    """Return the content of a calibration file with its metadata in alphabetical order.

    The safetensors library writes metadata in random order. Equal calibrations have equal canonical
    bytes. Nothing else of the file is changed.

    Args:
        content: The content of the file.

    Raises:
        ValueError: This is no safetensors file.
    """
    header = _parse_header(content)
    metadata_keys = header.get(METADATA, {})
    return _with_metadata_order(content, header, sorted(metadata_keys))


def calibration_digest(path: Path) -> str:
    """Return the SHA-256 of the canonical bytes of a calibration file.

    For files that this version writes, it is the SHA-256 of the file.

    Raises:
        OSError: The file cannot be read.
        ValueError: This is no safetensors file.
    """
    return hashlib.sha256(canonical_bytes(path.read_bytes())).hexdigest()


def is_older_digest(digest: str, path: Path) -> bool:
    """Return whether an older version may have recorded this digest for the calibration in a file.

    Older versions recorded the SHA-256 of the file as it was, with its metadata in any order. So
    the digest is compared with that of each form in which they may have written the file.

    Args:
        digest: The recorded digest.
        path: The calibration file.

    Raises:
        OSError: The file cannot be read.
        ValueError: This is no safetensors file.
    """
    content = path.read_bytes()
    return any(
        hashlib.sha256(older_content).hexdigest() == digest
        for older_content in _older_contents(content)
    )


def _older_contents(content: bytes) -> Iterator[bytes]:
    """Yield the content of a calibration file in each form that older versions may have written.

    Older versions wrote the metadata in any order, and at first without the digest of the
    statistics. So each possible order is tried, with and without this digest.
    """
    header = _parse_header(content)
    keys = list(header.get(METADATA, {}))
    if len(keys) > MAX_METADATA_KEYS:  # not written by any version, and orders would be many
        yield content
        return
    older_keys = [key for key in keys if key != STATISTICS_DIGEST]
    for ordered_keys in itertools.permutations(older_keys):
        yield _with_metadata_order(content, header, ordered_keys)
    if older_keys != keys:
        for ordered_keys in itertools.permutations(keys):
            yield _with_metadata_order(content, header, ordered_keys)


def _parse_header(content: bytes) -> dict[str, dict[str, object]]:
    """Return the header of a safetensors file: a description of each tensor, and the metadata.

    Raises:
        ValueError: This is no safetensors file.
    """
    # The file begins with the length of the header, then the header as JSON.
    length = int.from_bytes(content[:LENGTH_BYTES], "little")
    header = json.loads(content[LENGTH_BYTES : LENGTH_BYTES + length])
    if not isinstance(header, dict) or not isinstance(header.get(METADATA, {}), dict):
        raise ValueError("no header of a safetensors file")
    return header


def _with_metadata_order(
    content: bytes, header: dict[str, dict[str, object]], keys: Iterable[str]
) -> bytes:
    """Return the content of a safetensors file with its metadata in the given order.

    Args:
        content: The content of the file.
        header: Its header.
        keys: The keys of the metadata in the new order. A key that is not named is left out.

    Raises:
        ValueError: The header has another form than the library writes, so its bytes cannot be
            reproduced.
    """
    length = int.from_bytes(content[:LENGTH_BYTES], "little")
    new_header = header
    if METADATA in header:
        # A key that exists keeps its place in the dictionary, so tensors keep their order.
        new_header = header | {METADATA: {key: header[METADATA][key] for key in keys}}
    # The library writes compact JSON, and spaces up to a multiple of eight bytes.
    header_json = json.dumps(new_header, separators=(",", ":"), ensure_ascii=False).encode()
    new_length = math.ceil(len(header_json) / LENGTH_BYTES) * LENGTH_BYTES
    # Fewer keys make the header shorter. It is longer only if its JSON was written in another way.
    if new_length > length:
        raise ValueError("the header was not written by the safetensors library")
    length_field = new_length.to_bytes(LENGTH_BYTES, "little")
    return length_field + header_json.ljust(new_length) + content[LENGTH_BYTES + length :]
