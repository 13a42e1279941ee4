"""The command `virnuc devices`."""

import os

from virnuc.flows.cli.output import show_table


def devices() -> None:
    """List the devices of this machine, as --devices wants them."""
    from virnuc_core.engine.devices import cpu_name, find_gpus

    rows = []
    usable = find_gpus()
    for number, gpu in enumerate(usable.devices):
        rows.append((f"cuda:{number}", gpu.name, gpu.id))
    cores = len(os.sched_getaffinity(0))
    rows.append((f"cpu:{cores}", cpu_name(), f"{cores} cores this process may use"))
    show_table(("--devices", "name", "id"), rows)
    if not usable.devices:
        print(f"virnuc computes on CPU cores: {usable.absence}.")
