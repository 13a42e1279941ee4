"""`virnuc devices` and `virnuc profiles`: what is here, and what it can be held against."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from flows.options import command_parser
from flows.settings import plain_output
from virnuc_core.config import Profile, Target, load_profile, profile_names

WIDTH_IN_FILES: Final = 160


def console() -> Console:
    """Where tables go: standard output, without colours where those are not wanted."""
    width = None if sys.stdout.isatty() else WIDTH_IN_FILES
    return Console(no_color=plain_output(), highlight=False, width=width)


def devices(words: Sequence[str]) -> int:
    """List GPUs and cores, and the `--devices` text for each."""
    parser = command_parser("devices", "The devices of this machine, as --devices wants them.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    arguments = parser.parse_args(words)
    from virnuc_core.engine.devices import cpu_name, visible_gpus

    gpus = visible_gpus()
    cores = len(os.sched_getaffinity(0))
    found = [{"devices": f"cuda:{i}", "name": gpu.name, "id": gpu.id} for i, gpu in enumerate(gpus)]
    found.append({"devices": f"cpu:{cores}", "name": cpu_name(), "id": f"{cores} cores this process may use"})
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    table = Table("--devices", "name", "id", title=None)
    for row in found:
        table.add_row(row["devices"], row["name"], row["id"])
    console().print(table)
    if not gpus:
        print("No NVIDIA driver or GPU is visible; virnuc computes on CPU cores.")
    return 0


def profiles(words: Sequence[str]) -> int:
    """List the profiles that come with virnuc, or show one."""
    parser = command_parser("profiles", "The profiles of `virnuc validate`. A .toml file of your own works as well.")
    parser.add_argument("name", nargs="?", help="show the thresholds of this profile, or of this .toml file")
    arguments = parser.parse_args(words)
    if arguments.name is not None:
        _show(load_profile(arguments.name))
        return 0
    table = Table("profile", "what it asks", "reads", "meant for")
    for name in profile_names():
        profile = load_profile(name)
        table.add_row(name, profile.title, f"≥ {profile.min_reads:,}", ", ".join(profile.device_names) or "any device")
    console().print(table)
    return 0


def _show(profile: Profile) -> None:
    table = Table("criterion", "threshold", title=f"{profile.name}: {profile.title}")
    for name, target in profile.targets:
        if isinstance(target, Target):
            table.add_row(name.replace("_", " "), f"{target.op} {target.value:g}")
    console().print(table)
