"""Returns what two processes must have in common to give the same files under the same limits.

`virnuc serve` compares these facts before a process of the server works for a run. Little is
imported here, because every `virnuc predict` imports this module first.
"""

import os
import resource
import sys
from pathlib import Path
from typing import Final

import virnuc_core

# Beginnings of the names of environment variables that change what a worker computes, or how. They
# must have the same values in the server and in the run.
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
# The same for variables that are read when Python starts or when a package is imported. A child of
# a process that has started already cannot take them over.
START_VARIABLES: Final = (
    *("PYTHON", "_PYTHON", "HOME", "LANG", "LC_", "LOCPATH", "MALLOC_", "OPENSSL_"),
    *("NPY_", "NUMPY_", "PANDAS_", "PSUTIL_", "PYDANTIC_", "SETUPTOOLS_"),
)
# Lines of /proc/self/status with the rights of a process, and where it may compute
STATUS_LINES: Final = (
    *("Uid", "Gid", "Groups", "Umask", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
    *("NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed"),
)
# Files with the limits of a control group, and their content if there is no limit
GROUP_LIMITS: Final = {
    "memory.max": "max",
    "memory.high": "max",
    "memory.swap.max": "max",
    "cpu.max": "max 100000",
    "io.max": "",
}


def process_facts() -> dict[str, str]:
    """Return what must be equal for a command to run in a child of another process.

    The child can take over everything else from the terminal process
    (`virnuc_core.command_handover.ProcessState`), so that it need not be equal.

    Returns:
        Texts by the names that are shown to the user.
    """
    facts = {
        "version": virnuc_core.__version__,
        "program": str(Path(virnuc_core.__file__).resolve()),
        "Python": f"{sys.prefix} {sys.version}",
        "options of Python": f"{python_flags()} {sys._xoptions} {sys.warnoptions}",
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


def python_flags() -> dict[str, int]:
    """Return the options with which Python was started, by name.

    `safe_path` is left out. It tells whether modules are looked for in the folder of the script,
    which has none.
    """
    flags = {}
    for name in type(sys.flags).__match_args__:
        if name != "safe_path":
            flags[name] = getattr(sys.flags, name)
    return flags


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

    Two terminals of a user are usually in groups of different names. So the names alone must not
    count, only groups that set a limit.

    Args:
        root: The folder in which the system shows the control groups.
        groups: The text of `/proc/self/cgroup`. None reads it.

    Returns:
        The limits, each with its group. With version 1 of control groups, or if a group cannot be
        seen, the limits are not known. Then this is `groups`, so that only processes of the same
        group are equal.
    """
    if groups is None:
        groups = read_system_file("/proc/self/cgroup")
    path = groups.strip().removeprefix("0::/")
    is_version_2 = groups.startswith("0::/") and "\n" not in path
    is_outside_namespace = ".." in path
    is_mounted = Path(f"{root}/cgroup.controllers").is_file()
    if not is_version_2 or is_outside_namespace or not is_mounted:
        return groups
    # The group, and all groups that contain it. The text is empty for the outermost one.
    names = path.split("/") if path else []
    nested_groups = ["/".join(names[:depth]) for depth in range(len(names) + 1)]
    limits = []
    for group in nested_groups:
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
