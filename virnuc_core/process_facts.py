"""What two processes must have in common to give the same files under the same limits.

`virnuc serve` compares these facts before another process computes for a run. Little is imported
here, because every `virnuc predict` imports this module first.
"""

import os
import resource
import sys
from pathlib import Path
from typing import Final

import virnuc_core

# Beginnings of variables that change what or how a worker computes. The server's must be the same.
WORKER_VARIABLES: Final = (
    *("CUDA_", "CUBLAS", "CUDNN_", "NVIDIA_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTORCH_"),
    *("PYTHONHOME", "PYTHONPATH", "TORCH", "TRITON_", "TMPDIR", "GLIBC_TUNABLES"),
    # By these, the libraries on a CPU choose their instructions and threads.
    *("ATEN_", "DNNL_", "ONEDNN_", "KMP_", "GOMP_"),
    # How files are locked, and which files may be opened
    *("HDF5_", "VIRNUC_ROOTS"),
    # A batch job has limits of its own. A worker outside the job would not keep to them.
    *("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
)
# Further ones that are read when Python starts or when a package is imported. A child of a process
# that has started already cannot take them over.
START_VARIABLES: Final = (
    *("PYTHON", "_PYTHON", "HOME", "LANG", "LC_", "LOCPATH", "MALLOC_", "OPENSSL_"),
    *("NPY_", "NUMPY_", "PANDAS_", "PSUTIL_", "PYDANTIC_", "SETUPTOOLS_"),
)
# Lines of /proc/self/status with the rights of a process, and where it may compute
STATUS_LINES: Final = (
    *("Uid", "Gid", "Groups", "Umask", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
    *("NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed"),
)
# Files with the limits of a control group, and what stands in them if there is no limit
GROUP_LIMITS: Final = {
    "memory.max": "max",
    "memory.high": "max",
    "memory.swap.max": "max",
    "cpu.max": "max 100000",
    "io.max": "",
}


def process_facts() -> dict[str, str]:
    """Return what must be equal for a command to run in a child of another process.

    What a child can take over is not among it: the streams, the working directory, all other
    limits, the priority, and all other environment variables.
    """
    flags = {}
    for name in type(sys.flags).__match_args__:
        # `safe_path` tells whether the folder of the script is searched for modules. It has none.
        if name != "safe_path":
            flags[name] = getattr(sys.flags, name)
    facts = {
        "version": virnuc_core.__version__,
        "program": str(Path(virnuc_core.__file__).resolve()),
        "Python": f"{sys.prefix} {sys.version}",
        "options of Python": f"{flags} {sys._xoptions} {sys.warnoptions}",
        "unbuffered output": str(getattr(sys.__stdout__, "write_through", "")),
        "root folder": str(Path("/proc/self/root").readlink()),
        "control group": control_group_limits(),
        "limit of memory": memory_limits(),
        "security label": read_system_file("/proc/self/attr/current"),
    }
    for link in Path("/proc/self/ns").iterdir():
        facts[f"namespace {link.name}"] = str(link.readlink())
    for line in read_system_file("/proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name in STATUS_LINES:
            facts[name] = value.strip()
    for name, value in os.environ.items():
        if name.startswith((*WORKER_VARIABLES, *START_VARIABLES)):
            facts[name] = value
    return facts


def memory_limits() -> str:
    """Return the limits of the memory of this process (`ulimit -v` and `ulimit -d`).

    A child begins with the memory of its parent. If that is more than the limit already, the child
    gets no more of it and may wait for a thread that could not begin.
    """
    address_space = resource.getrlimit(resource.RLIMIT_AS)
    data = resource.getrlimit(resource.RLIMIT_DATA)
    return f"{address_space} {data}"


def control_group_limits(root: str = "/sys/fs/cgroup", groups: str | None = None) -> str:
    """Return the limits of memory, cores and disk that the control groups of this process set.

    Two terminals of a user are usually in groups of different names, and without such limits.

    Args:
        root: Where the control groups are seen as folders.
        groups: The text of `/proc/self/cgroup`; None reads it.

    Returns:
        The limits, each with its group. Without the unified hierarchy (version 2) the limits are
        not looked for. Then it is the text of the groups, which is equal within one group only.
    """
    if groups is None:
        groups = read_system_file("/proc/self/cgroup")
    path = groups.strip().removeprefix("0::/")
    is_unified = groups.startswith("0::/") and "\n" not in path
    # Beginning with `..`, a group outside of what this namespace shows
    if not is_unified or ".." in path or not Path(f"{root}/cgroup.controllers").is_file():
        return groups
    limits = []
    names = path.split("/") if path else []
    for depth in range(len(names) + 1):
        group = "/".join(names[:depth])
        for file_name, unlimited in GROUP_LIMITS.items():
            value = read_system_file(f"{root}/{group}/{file_name}").strip()
            if value not in ("", unlimited):
                limits.append(f"{group}/{file_name} {value}")
    return "; ".join(limits)


def read_system_file(path: str) -> str:
    """Return the text of a file of the system; an empty text if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
