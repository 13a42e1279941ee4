"""Build the library of kernels for Hopper GPUs: writes `hopper.so` and `hopper.json`.

Only who changes a kernel needs this. Users get the library with the package. `make kernels`
calls it. It needs `g++`, `strip`, `objcopy` and the packages of
`encoders/cuda/requirements.txt`: NVIDIA's compiler and the headers of CUTLASS.

`hopper.json` records the digests of the sources and of the code for the GPU. A test compares both
with the files, so that no source is changed without a new library. Two builds in the same folder
give the same code for the GPU. In another folder the code differs, because the compiler
derives names in it from the path.
"""

import hashlib
import json
import subprocess
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from virnuc_core.encoders.hopper import LIBRARY

FOLDER: Final = Path(__file__).parents[1] / "encoders" / "cuda"
SOURCES: Final = ("int8_product.cu", "int8_rows.cu")
RECORD: Final = FOLDER / "hopper.json"
GPU_SECTION: Final = ".nv_fatbin"  # the section of a library with the code for the GPU
PACKAGES: Final = ("nvidia-cuda-nvcc", "nvidia-cutlass")
FLAGS: Final = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xcompiler=-fPIC",
    "-shared",
)


def main() -> int:
    """Build the library and its record. Returns the exit code, 0."""
    build(LIBRARY)
    RECORD.write_text(json.dumps(describe(LIBRARY), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {LIBRARY} and {RECORD.name}")
    return 0


def build(library: Path) -> None:
    """Compile all sources into one shared library. NVIDIA's runtime is linked into it.

    Args:
        library: Where it is written.
    """
    cuda = _package_folder("nvidia", "cu13/bin/nvcc") / "cu13"
    cutlass = _package_folder("cutlass_library", "source/include/cutlass/cutlass.h") / "source"
    command = [
        str(cuda / "bin" / "nvcc"),
        *FLAGS,
        f"-I{cutlass / 'include'}",
        f"-I{cutlass / 'tools' / 'util' / 'include'}",
        f"-I{cuda / 'include'}",
        f"-L{cuda / 'lib'}",
        *SOURCES,
        "-o",
        str(library),
    ]
    # In the folder of the sources, because the compiler writes their paths into the library.
    subprocess.run(command, cwd=FOLDER, check=True)
    subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)
    _hide_folder(library, cuda)


def _hide_folder(library: Path, folder: Path) -> None:
    """Replace the path of a folder in a library by another text of the same length, in place.

    The linker writes into the library where it looked for other libraries. Nothing reads that
    later, and the path of the builder's machine is nobody's business.
    """
    path = str(folder).encode()
    neutral = b"/usr/local/cuda".ljust(len(path), b"/")[: len(path)]
    library.write_bytes(library.read_bytes().replace(path, neutral))


def describe(library: Path) -> dict[str, object]:
    """Return the record of a library: digests of its sources and of its code, and versions."""
    return {
        "sources": source_digests(),
        "gpu_code": gpu_code_digest(library),
        "built_with": {name: metadata.version(name) for name in PACKAGES},
    }


def source_digests() -> dict[str, str]:
    """Return the SHA-256 of each source, by its name."""
    return {name: hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() for name in SOURCES}


def gpu_code_digest(library: Path) -> str:
    """Return the SHA-256 of the code for the GPU in a library."""
    with tempfile.TemporaryDirectory() as folder:
        section = Path(folder, "section")
        subprocess.run(
            ["objcopy", "-O", "binary", f"--only-section={GPU_SECTION}", library, section],
            check=True,
        )
        return hashlib.sha256(section.read_bytes()).hexdigest()


def _package_folder(name: str, contained: str) -> Path:
    """Return the folder of an installed package.

    Args:
        name: The package. Several distributions may share it, each with a folder of its own.
        contained: A file that the wanted folder contains.

    Raises:
        SystemExit: There is no such folder.
    """
    spec = find_spec(name)
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        if Path(folder, contained).exists():
            return Path(folder)
    raise SystemExit(f"{name}/{contained} is not installed; call this by `make kernels`")


if __name__ == "__main__":
    raise SystemExit(main())
