"""The devices that a validation or a scaling curve is measured on: this machine's, or those of a
cluster's nodes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from virnuc_core.config import ClassifySpec, Devices
from virnuc_core.engine.devices import auto_remark, resolve
from virnuc_core.engine.pool import Pool
from virnuc_core.errors import DeviceError
from virnuc_core.profiles import Profile
from virnuc_core.runfiles import Device

if TYPE_CHECKING:
    from virnuc_core.engine.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Machines:
    """The devices of all machines, one machine's after the other's.

    Attributes:
        devices: All devices, in the order in which runs take them.
        node_ends: Number of devices of the first machine, of the first two, and so on. Without a
            cluster each device counts as a machine.
        local: The devices of this machine of the kind that the runs use. Measurements that do not
            run on a cluster use them. It may name none.
        cluster: The connected cluster, or None if the runs stay on this machine.
    """

    devices: tuple[Device, ...]
    node_ends: tuple[int, ...]
    local: Devices
    cluster: Cluster | None

    @property
    def has_local_devices(self) -> bool:
        """Tell whether this machine has a device of the kind that the runs use."""
        return bool(self.local.ids)

    @property
    def has_local_gpus(self) -> bool:
        """Tell whether this machine has GPUs and the runs use GPUs."""
        return self.has_local_devices and self.local.kind == "cuda"

    def device_counts(self) -> list[int]:
        """Return the numbers of devices that a validation runs on: one, two and all."""
        total = len(self.devices)
        return sorted({1, min(2, total), total})

    def scaling_counts(self, profile: Profile, repeats: int) -> list[int]:
        """Return the numbers of devices of a scaling curve.

        Args:
            profile: The profile, whose scaling bands name numbers of devices.
            repeats: How often each number is measured.

        Returns:
            One device, the devices of 1, 2, 4, … machines, those that the profile names, and all.
            The whole list is repeated `repeats` times.
        """
        total = len(self.devices)
        device_counts = {1, total}
        n_machines = 1
        while n_machines <= len(self.node_ends):
            # All devices of the first `n_machines` machines.
            device_counts.add(self.node_ends[n_machines - 1])
            n_machines *= 2
        device_counts.update(int(count) for count in profile.scaling_bands)
        counts = sorted(count for count in device_counts if count <= total)
        return counts * repeats

    def subset(self, count: int) -> Devices:
        """Return the first `count` devices, as a setting that names each of them."""
        ids = tuple(device.id for device in self.devices[:count])
        return self.local.model_copy(update={"ids": ids})

    def workers(self, count: int) -> AbstractContextManager[Pool | None]:
        """Return a context manager that yields workers on the first `count` devices of a cluster.

        On this machine it yields None, and the run starts its own workers.
        """
        if self.cluster is None:
            return nullcontext()
        return self.cluster.pool(self.devices[:count])


def find_machines(spec: ClassifySpec, cluster: Cluster | None) -> Machines:
    """Find the devices that the runs will use, and group them by machine.

    Args:
        spec: Settings of the runs.
        cluster: The connected cluster, or None to use this machine's devices.

    Returns:
        The devices of the cluster's nodes, or those of this machine. `local` names this machine's
        devices in both cases.

    Raises:
        DeviceError: A device that the settings name does not exist here (without a cluster).
    """
    nodes: list[tuple[Device, ...]]
    if cluster is None:
        # Each device counts as a machine.
        nodes = [(device,) for device in resolve(spec.devices)]
    else:
        nodes = [tuple(node.devices) for node in cluster.used]

    devices: list[Device] = []
    node_ends = []
    for node_devices in nodes:
        devices += node_devices
        node_ends.append(len(devices))

    kind = devices[0].kind
    # The run's record says why `auto` took the CPU. On a cluster `auto` decides nothing here.
    remark = auto_remark(spec.devices) if cluster is None else ""
    local = Devices(kind=kind, ids=_local_ids(spec, kind), auto_remark=remark)
    return Machines(tuple(devices), tuple(node_ends), local, cluster)


def _local_ids(spec: ClassifySpec, kind: str) -> tuple[str, ...]:
    """Return the ids of this machine's devices of a kind.

    The result is empty if the devices that the settings name are not here, which may be so for runs
    on a cluster.
    """
    try:
        local_devices = resolve(spec.devices)
    except DeviceError:
        return ()
    return tuple(device.id for device in local_devices if device.kind == kind)
