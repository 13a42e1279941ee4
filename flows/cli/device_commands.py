"""The command `virnuc devices`."""

import os

from virnuc.flows.cli.output import show_table


def devices() -> None:
    """List the devices of this machine, as --devices wants them."""
    from virnuc_core.engine.devices import cpu_name, visible_gpus

    rows = []
    gpus = visible_gpus()
    for number, gpu in enumerate(gpus):
        rows.append((f"cuda:{number}", gpu.name, gpu.id))
    cores = len(os.sched_getaffinity(0))
    rows.append((f"cpu:{cores}", cpu_name(), f"{cores} cores this process may use"))
    show_table(("--devices", "name", "id"), rows)
    if not gpus:
        print("No NVIDIA driver or GPU is visible; virnuc computes on CPU cores.")
