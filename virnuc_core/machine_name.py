"""The name under which figures of this machine are kept and compared.

In a container the host name is random, so every night would be the first one on a new machine. The
user, or the worker that starts a run, may give the machine a lasting name.
"""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Final

HOST: Final = "VIRNUC_HOST"
# Files that container engines make, and a variable that Kubernetes sets.
CONTAINER_FILES: Final = (Path("/.dockerenv"), Path("/run/.containerenv"))
KUBERNETES: Final = "KUBERNETES_SERVICE_HOST"


def machine_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name of this machine for records, the history and keys of artifacts.

    Args:
        environment: The environment of the process.

    Returns:
        The value of `VIRNUC_HOST` or, without one, the host name.
    """
    return environment.get(HOST, "").strip() or platform.node()


def is_container(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process runs in a container, whose host name means nothing."""
    return KUBERNETES in environment or any(path.exists() for path in CONTAINER_FILES)
