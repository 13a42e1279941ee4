"""The public encoders, downloaded at pinned revisions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from virnuc_core.encoders.checkpoint import Storage
from virnuc_core.encoders.convert import convert_dnabert_s, convert_esm2, convert_head
from virnuc_core.errors import WeightsError

ESM2_REPOSITORY: Final = ("facebook/esm2_t36_3B_UR50D", "476b639933c8baad5ad09a60ac1a87f987b656fc")
DNABERT_REPOSITORY: Final = ("zhihan1996/DNABERT-S", "00e47f96cdea35e4b6f5df89e5419cbe47d490c6")

# weights and sizes only: no code of a repository is downloaded, let alone run
FILES: Final = ("config.json", "tokenizer.json", "model*.safetensors*", "pytorch_model*.bin*")

Download = Callable[[str, str], Path]


def fetch(
    out: Path,
    head: Path,
    *,
    model_length: int | None = None,
    dtype: Storage | None = None,
    download: Download | None = None,
) -> None:
    """Make a models directory of the public ESM-2 3B and DNABERT-S, and a head file of VirNucPro.

    The head (`300_model.pth` or `500_model.pth`) comes with VirNucPro's own repository and is not downloaded here.
    Parts that `out` already holds are left as they are. Raises `WeightsError` when the network does not answer.
    """
    if not head.is_file():
        raise WeightsError(f"{head}: no such file; 300_model.pth and 500_model.pth come with VirNucPro's repository")
    get = download or _download
    if not (out / "head").exists():
        convert_head(head, out, model_length)
    if not (out / "dnabert_s").exists():
        convert_dnabert_s(get(*DNABERT_REPOSITORY), out, dtype=dtype)
    if not (out / "esm2").exists():
        convert_esm2(get(*ESM2_REPOSITORY), out, dtype=dtype)


def _download(repository: str, revision: str) -> Path:
    """Folder of a repository's weights at one revision, in the cache of huggingface_hub."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(FILES)))
    except Exception as error:  # the library and what it stands on raise many kinds
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WeightsError(
            f"{repository} at {revision[:12]}: cannot be downloaded ({first}); "
            f"without a network, copy its files here and use virnuc models convert"
        ) from error
