"""Build the library of kernels for Hopper GPUs: writes `hopper.so` and `hopper.json`.

Only who changes a kernel needs this. Users get the library with the package. `make kernels`
calls it. It needs `g++`, `strip`, `objcopy` and the packages of
`encoders/cuda/requirements.txt`: NVIDIA's compiler and the headers of CUTLASS.

The bytes of the library depend on its sources and on the versions of the compilers. They do not
depend on folders, the user or the time. `make kernels-check` builds the library again and compares
it with the one of the package.

`hopper.json` records the digests of the sources, of the library and of its code for the GPU, and
what built them. A test compares them with the files, so that no source and no version of a
compiler is changed without a new library.
"""

import argparse
import hashlib
import json
import os
import subprocess
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from virnuc_core.encoders.hopper import LIBRARY, RECORD

FOLDER: Final = Path(__file__).parents[1] / "encoders" / "cuda"
SOURCES: Final = ("int8_product.cu", "int8_rows.cu")
REQUIREMENTS: Final = FOLDER / "requirements.txt"
GPU_SECTION: Final = ".nv_fatbin"  # the section of a library with the code for the GPU
# The programs of this machine that make the code for the CPU. Other versions make other code.
HOST_TOOLS: Final = ("g++", "as", "ld", "strip")
FLAGS: Final = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xcompiler=-fPIC",
)


class HostToolError(Exception):
    """A program that the build needs is not installed."""


def main(arguments: list[str] | None = None) -> int:
    """Build the library and its record, or compare a new build with them.

    Args:
        arguments: `--check` to compare and to write nothing. None: those of the command line.

    Returns:
        The exit code: 1 if the comparison found a difference, otherwise 0.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare a new build, write nothing")
    if parser.parse_args(arguments).check:
        return check()
    build(LIBRARY)
    RECORD.write_text(json.dumps(describe(LIBRARY), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {LIBRARY} and {RECORD.name}")
    return 0


def check() -> int:
    """Build the library again, and compare it with the one of the package.

    The code for the CPU is compared only where the programs of this machine have the versions that
    built the library of the package.

    Returns:
        0 if the library is the same, or could not be built here; 1 if it differs.
    """
    try:
        tools = host_tools()
    except HostToolError as error:
        print(f"{LIBRARY.name} built again: not run. {error}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rebuilt = Path(folder, LIBRARY.name)
        build(rebuilt)
        is_same = rebuilt.read_bytes() == LIBRARY.read_bytes()
        is_same_on_gpu = gpu_code_digest(rebuilt) == gpu_code_digest(LIBRARY)
    if is_same:
        print(f"{LIBRARY.name} built again: all {LIBRARY.stat().st_size:,} bytes are the same")
        return 0
    if not is_same_on_gpu:
        print(f"{LIBRARY.name} built again: the code for the GPU differs. Run make kernels.")
        return 1
    recorded_tools = json.loads(RECORD.read_bytes())["host_tools"]
    if tools != recorded_tools:
        changed = [name for name in HOST_TOOLS if tools[name] != recorded_tools.get(name)]
        details = "; ".join(f"{tools[name]}, not {recorded_tools.get(name)}" for name in changed)
        print(
            f"{LIBRARY.name} built again: the code for the GPU is the same. "
            f"The code for the CPU: not run, because here is {details}"
        )
        return 0
    print(f"{LIBRARY.name} built again: the code for the CPU differs. Run make kernels.")
    return 1


def build(library: Path) -> None:
    """Compile all sources into one shared library. NVIDIA's runtime is linked into it.

    Args:
        library: Where it is written.
    """
    cuda = _package_folder("nvidia", "cu13/bin/nvcc") / "cu13"
    cutlass = _package_folder("cutlass_library", "source/include/cutlass/cutlass.h") / "source"
    include_folders = [
        cutlass / "include",
        cutlass / "tools" / "util" / "include",
        cuda / "include",
    ]
    includes = [f"-I{folder}" for folder in include_folders]
    nvcc = str(cuda / "bin" / "nvcc")
    path = os.pathsep.join([f"{cuda}/nvvm/bin", f"{cuda}/bin", os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        # No other variables: some would add flags or folders.
        environment = {"PATH": path, "LC_ALL": "C", "TMPDIR": folder}
        objects = []
        for source in SOURCES:
            # The compiler makes names from the full path of a source. This sets a path which is
            # the same everywhere.
            fixed_path = f"-Xcudafe=--orig_src_path_name={source}"
            compiled = f"{folder}/{Path(source).stem}.o"
            command = [nvcc, *FLAGS, *includes, fixed_path, "-c", source, "-o", compiled]
            subprocess.run(command, cwd=FOLDER, env=environment, check=True)
            objects.append(compiled)
        # The linker writes into the library where it looks for other libraries. Therefore it is
        # started in the folder of the compiler with relative paths. The profile has full paths.
        command = [nvcc, "--dont-use-profile", *FLAGS, "-Iinclude", "-Llib", "-shared", *objects]
        command += ["-o", str(library.resolve())]
        subprocess.run(command, cwd=cuda, env=environment, check=True)
    subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)


def describe(library: Path) -> dict[str, object]:
    """Return the record of a library: digests of its sources and of its code, and what built it."""
    return {
        "sources": source_digests(),
        "library": hashlib.sha256(library.read_bytes()).hexdigest(),
        "gpu_code": gpu_code_digest(library),
        "flags": list(FLAGS),
        "built_with": {name: metadata.version(name) for name in required_versions()},
        "host_tools": host_tools(),
    }


def required_versions() -> dict[str, str]:
    """Return the version of each package that the library is built with, by name."""
    versions = {}
    for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        if "==" in line:
            name, version = line.split()[0].split("==")
            versions[name] = version
    return versions


def host_tools() -> dict[str, str]:
    """Return which versions of the host's programs are installed, by name.

    Raises:
        HostToolError: One of them is not installed.
    """
    versions = {}
    for name in HOST_TOOLS:
        try:
            finished = subprocess.run(
                [name, "--version"], capture_output=True, text=True, check=True
            )
        except FileNotFoundError as error:
            raise HostToolError(f"{name} is not installed") from error
        versions[name] = finished.stdout.splitlines()[0]
    return versions


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
