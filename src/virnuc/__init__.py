"""virnuc: which short sequencing reads are viral.

`predict` and `open_run` are for scripts and notebooks; they return a `Run`. `inspect` tells what a
run would see. The folders at the top of the repository appear below this package, so that nothing
with a common name such as `flows` is installed: `virnuc.flows`, `virnuc.tasks` and
`virnuc.deployments`. The library itself is `virnuc_core`.
"""

from typing import TYPE_CHECKING, Any

from virnuc_core import __version__

if TYPE_CHECKING:
    from virnuc_core.finished_run import Run, open_run, predict
    from virnuc_core.inspection.interface import inspect

__all__ = ["Run", "__version__", "inspect", "open_run", "predict"]


def __getattr__(name: str) -> Any:
    """Import `predict`, `open_run`, `Run` and `inspect` when they are first used.

    They need pandas and h5py, and the command line must start without them.
    """
    if name not in __all__:
        raise AttributeError(f"module 'virnuc' has no attribute {name!r}")
    if name == "inspect":
        from virnuc_core.inspection import interface

        return interface.inspect
    from virnuc_core import finished_run

    return getattr(finished_run, name)
