"""Remember the order in which CUDA numbers the GPUs of this machine.

By default CUDA puts the fastest GPU first. NVML lists GPUs by their PCI addresses, so CUDA must be
asked. This must not happen in our own process, because its children could not use CUDA then. nvitop
starts two processes for it, which takes 0.6 s. The order stays the same until the machine is
restarted, so it is kept in `~/.cache/virnuc/gpu-order`.

A file there holds what was true when CUDA was asked. If anything of that has changed, CUDA is asked
again.
"""

import hashlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeGuard

from virnuc_core.errors import VirnucError
from virnuc_core.rundir import write_text_atomically

CACHE: Final = "~/.cache/virnuc/gpu-order"
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")  # another text after each restart
# They decide which GPUs CUDA shows, in which order, and which CUDA library is loaded.
VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH")


def recall_order(
    uuids: Sequence[str], driver: str, environment: Mapping[str, str] = os.environ
) -> list[str] | None:
    """Return the GPUs that CUDA shows, in its order, if CUDA was asked under the same conditions.

    Args:
        uuids: UUIDs of the GPUs of the driver, in its order. None of them is divided (MIG).
        driver: Version of the driver.
        environment: The environment variables of the process.

    Returns:
        UUIDs, at least one. None if CUDA must be asked.
    """
    conditions = _conditions(uuids, driver, environment)
    # Whatever is wrong with the file or its folder: CUDA is asked, which is right and slower.
    with suppress(OSError, ValueError, RuntimeError):
        content = json.loads(_path(conditions).read_text("utf-8"))
        if isinstance(content, dict) and content.get("conditions") == conditions:
            order = content.get("order")
            if _is_order(order, uuids):
                return order
    return None


def remember_order(
    order: list[str],
    uuids: Sequence[str],
    driver: str,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Keep what CUDA answered, for `recall_order`. If it cannot be kept, nothing is lost but time.

    Args:
        order: UUIDs of the GPUs that CUDA shows, in its order.
        uuids: UUIDs of the GPUs of the driver, in its order.
        driver: Version of the driver.
        environment: The environment variables of the process.
    """
    if not _is_order(order, uuids):
        return
    # RuntimeError: nothing names the home directory
    with suppress(OSError, VirnucError, RuntimeError):
        conditions = _conditions(uuids, driver, environment)
        text = json.dumps({"conditions": conditions, "order": order})
        write_text_atomically(_path(conditions), text)


def _conditions(
    uuids: Sequence[str], driver: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return all that CUDA's order depends on."""
    boot = ""
    with suppress(OSError):
        boot = BOOT_ID.read_text("ascii").strip()
    return {
        "host": socket.gethostname(),
        "boot": boot,
        "driver": driver,
        "gpus": list(uuids),
        "variables": [environment.get(name) for name in VARIABLES],
    }


def _path(conditions: Mapping[str, Any]) -> Path:
    """Return where the order is kept.

    A machine has one file for each set of variables, so that restarts and updates of the driver
    replace a file and add none.

    Raises:
        RuntimeError: Nothing names the home directory.
    """
    key = json.dumps([conditions["host"], conditions["variables"]])
    name = hashlib.sha256(key.encode()).hexdigest()
    return Path(CACHE).expanduser() / f"{name}.json"


def _is_order(order: object, uuids: Sequence[str]) -> TypeGuard[list[str]]:
    """Return whether a value is a list of different GPUs of the driver, at least one."""
    if not isinstance(order, list):
        return False
    if not all(isinstance(uuid, str) for uuid in order):  # a set can only hold simple values
        return False
    distinct_uuids = set(order)
    if len(distinct_uuids) < len(order):
        return False
    if not distinct_uuids.issubset(uuids):
        return False
    return len(order) > 0
