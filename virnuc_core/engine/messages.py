"""What a worker is told, and what `auto` became: resolved once, recorded, part of the fingerprint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from virnuc_core.config import RESULT_FIELDS, EngineSpec
from virnuc_core.engine.devices import Device
from virnuc_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Digests of all that decides a result, besides the settings."""

    reads: str
    esm2: str
    dnabert_s: str
    head: str


def resolve_engine(engine: EngineSpec, kind: Literal["cuda", "cpu"]) -> EngineSpec:
    """Replace every `auto` by what it means on this kind of device; `ConfigError` for what cannot run there."""
    precision = engine.precision
    if precision == "auto":
        precision = "fp16" if kind == "cuda" else "fp32"
    if kind == "cpu" and precision != "fp32":
        raise ConfigError(f"precision {precision} needs a CUDA device; on CPU choose fp32 or auto")
    return engine.model_copy(update={"precision": precision})


def result_settings(engine: EngineSpec) -> dict[str, Any]:
    """The settings that may change result bytes."""
    # "compile" was a setting that was off: runs of then are resumed, and fingerprints stay what they were
    return {"compile": False} | {name: getattr(engine, name) for name in RESULT_FIELDS}


def job_fingerprint(prints: Fingerprints, engine: EngineSpec, kind: str) -> str:
    """Digest of reads, weights, result settings and kind of device: what a shard's bytes depend on."""
    body = {"prints": asdict(prints), "settings": result_settings(engine), "kind": kind}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ShardTask:
    """What a worker is asked to compute: a shard, or, looking for a row that ends workers, a part of one."""

    shard: int
    lo: int
    hi: int
    divisor: int = 1  # of the token budgets
    skip: tuple[int, ...] = ()  # uniques left out
    probe: bool = False  # compute and say so, commit nothing

    def to_json(self) -> dict[str, Any]:
        """As sent to the worker."""
        return {"op": "compute", **asdict(self)}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> ShardTask:
        """As read by the worker."""
        return cls(body["shard"], body["lo"], body["hi"], body["divisor"], tuple(body["skip"]), body["probe"])


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """What a worker records with torch's profiler, once: whole shards, so that every encoder and the head are in it."""

    folder: str  # `<device>.json.gz` and `<device>.operations.json` are written there
    skip: int = 1  # shards left out first: they warm caches and allocators
    shards: int = 1
    operations: int = 50  # rows of the table of operations
    max_bytes: int = 200 << 20  # a larger trace is removed, its table stays
    shapes: bool = False
    memory: bool = False


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The first line a worker reads: all it needs to load, while the reads may still be staged."""

    models: str
    device: Device
    engine: EngineSpec
    divisor: int = 1  # of the token budgets, after the device was found too small for them
    trace: TraceSpec | None = None

    def to_json(self) -> dict[str, Any]:
        """As sent to the worker."""
        return {
            "models": self.models,
            "device": self.device.record(),
            "engine": self.engine.model_dump(mode="json"),
            "divisor": self.divisor,
            "trace": None if self.trace is None else asdict(self.trace),
        }

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> WorkerSpec:
        """As read by the worker."""
        return cls(
            body["models"],
            Device(**body["device"]),
            EngineSpec.model_validate(body["engine"]),
            body["divisor"],
            None if body["trace"] is None else TraceSpec(**body["trace"]),
        )


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The second line a worker reads: what its tasks are about."""

    run: str
    store: str
    reads: str  # fingerprint of the store the plan was made for
    logs: str  # folder of what workers write to standard error

    def to_json(self) -> dict[str, Any]:
        """As sent to the worker."""
        return {"op": "begin", **asdict(self)}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> JobSpec:
        """As read by the worker."""
        return cls(body["run"], body["store"], body["reads"], body["logs"])
