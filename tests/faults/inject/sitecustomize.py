"""Faults put into processes from outside: Python imports this at start when its folder is on PYTHONPATH.

The product has no switch for any of this. `VIRNUC_FAULT` is a JSON object. Something that the product stands on is
taken out by `{"kind": "no seals" | "no locks" | "no parent-death signal"}`. A worker fails by
`{"kind": "poison" | "raise" | "oom" | "hang" | "nan", "protein": "...", "marker": "path"}`. The fault strikes when a
batch holds the tokens of `protein`, always where there is none; with a marker it strikes once only, the first time.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys

FAULT = json.loads(os.environ.get("VIRNUC_FAULT", "{}"))


def strike(batch: object) -> bool:
    """Return whether the fault is due: the guilty row is in this batch."""
    import numpy as np

    from virnuc_core.encoders.tokenize import Esm2Tokenizer

    if "protein" not in FAULT:
        return True
    target_tokens = Esm2Tokenizer().encode([FAULT["protein"].encode()])[0].numpy()
    tokens = batch.tokens.cpu().numpy()  # type: ignore[attr-defined]
    if len(tokens) < len(target_tokens):
        return False
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(target_tokens))
    if not (windows == target_tokens).all(axis=1).any():
        return False
    marker = FAULT.get("marker")
    if marker:
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
    return True


def infect(module: object) -> None:
    """Wrap `Esm2.embed` of the freshly imported module."""
    cls = module.Esm2  # type: ignore[attr-defined]
    healthy = cls.embed

    def embed(self: object, batch: object) -> object:
        if strike(batch):
            import time

            import torch

            kind = FAULT["kind"]
            if kind == "poison":
                os.kill(os.getpid(), 9)
            elif kind == "raise":
                raise RuntimeError("device-side assert triggered")
            elif kind == "oom":
                if batch.slots > FAULT["fits"]:  # type: ignore[attr-defined]
                    raise torch.OutOfMemoryError("CUDA out of memory")
            elif kind == "hang":
                time.sleep(3600)
            elif kind == "nan":
                return healthy(self, batch) * float("nan")
        return healthy(self, batch)

    cls.embed = embed


def without_seals(module: object) -> None:
    """Every shard counts as what was committed."""
    module.is_sealed = lambda _path: True  # type: ignore[attr-defined]
    module._checksum = lambda *_: "sum"  # type: ignore[attr-defined]


def deaf(*_: object) -> None:
    """In the place of `die_with_parent`; by name, because it is sent to other processes."""


def without_death(module: object) -> None:
    """A process does not hear that its parent has died."""
    assert module.die_with_parent  # type: ignore[attr-defined]
    module.die_with_parent = deaf  # type: ignore[attr-defined]


def without_leases(module: object) -> None:
    """Whoever wants a lease has it, and goes on having it."""
    module.Lease.take = lambda *_, **__: ""  # type: ignore[attr-defined]
    module.Lease.check_held = lambda *_: True  # type: ignore[attr-defined]
    module.Lease.release = module.Lease.beat = lambda *_: None  # type: ignore[attr-defined]


def without_guard(module: object) -> None:
    """A temporary server has only Prefect's own authentication, which leaves some pages open."""
    module.OwnerOnly = lambda app, _host, _secret: app  # type: ignore[attr-defined]


def without_first_use(module: object) -> None:
    """Nobody waits for another process that makes something on first use."""
    module.FirstUseLock.take = lambda _: None  # type: ignore[attr-defined]


CHANGES = {
    "no guard": ("virnuc.flows.cli.server_guard", without_guard),
    "no first use": ("virnuc_core.first_use", without_first_use),
    "no locks": ("virnuc_core.lease", without_leases),
    "no seals": ("virnuc_core.engine.shards", without_seals),
    "no parent-death signal": ("virnuc_core.rundir", without_death),
}
TARGET, CHANGE = CHANGES.get(FAULT.get("kind", ""), ("virnuc_core.encoders.models", infect))


class Finder(importlib.abc.MetaPathFinder):
    """Lets the module load as it is, then wraps it."""

    def find_spec(self, name: str, path: object, target: object = None) -> object:
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        load = spec.loader.exec_module  # type: ignore[union-attr]

        def exec_module(module: object) -> None:
            load(module)  # type: ignore[arg-type]
            CHANGE(module)  # type: ignore[operator]

        spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
        return spec


if FAULT:
    import importlib.util

    sys.meta_path.insert(0, Finder())
