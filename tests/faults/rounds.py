"""Which kinds of rounds there are, and what is written of one that was played."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from .scene import Work


@dataclass(frozen=True, slots=True)
class Plan:
    """One kind of round."""

    how: str  # kill, stop, terminate, interrupt, disk, filesize, flip, cut, zero, remove, twin, rewrite, odd
    whom: str  # a kind of process, of file, of second run
    command: str = "predict"
    server: str = "any"  # any, none, embedded, own (a server of this round's own)
    nodes: int = 0  # of a cluster on this machine
    transfer: bool = False  # its files go through Dask

    @property
    def work(self) -> Work:
        """What an undisturbed round does."""
        reads = "inbox" if self.command == "predict-inbox" else "a"
        return Work(self.command, reads, nodes=self.nodes, transfer=self.transfer)

    @property
    def name(self) -> str:
        """As the table shows it."""
        where = f" ({self.server} server)" if self.server != "any" else ""
        where += " of a cluster" * bool(self.nodes) + " by transfer" * self.transfer
        return f"{self.command}: {self.how} {self.whom}{where}"


def plans() -> tuple[Plan, ...]:
    """Every kind of round, those of one kind apart from each other."""
    found = [Plan("kill", whom) for whom in ("main", "all", "worker", "staging")]
    found += [Plan("kill", f"main while {kind}") for kind in ("staging", "worker")]
    found += [
        Plan("kill", "main while baseline", "validate"),
        Plan("terminate", "main while staging"),
    ]
    found += [Plan("kill", "loader"), Plan("stop", "loader")]
    found += [
        Plan("kill", whom, "validate") for whom in ("main", "all", "worker", "staging", "baseline")
    ]
    found += [Plan("kill", whom, "predict-inbox") for whom in ("main", "all", "worker")]
    found += [Plan("stop", whom) for whom in ("main", "worker", "staging")]
    found += [Plan("stop", whom, "validate") for whom in ("worker", "staging", "baseline")]
    found += [Plan("stop", "worker", "predict-inbox")]
    found += [
        Plan(how, "server", "predict", kind)
        for how in ("kill", "stop")
        for kind in ("embedded", "own")
    ]
    found += [
        Plan("kill", "server", "validate", "embedded"),
        Plan("stop", "server", "validate", "own"),
    ]
    found += [
        Plan("terminate", whom)
        for whom in ("main", "after worker stopped", "after staging stopped")
    ]
    found += [
        Plan("terminate", "after server stopped", "predict", kind) for kind in ("embedded", "own")
    ]
    found += [Plan("terminate", "main", command) for command in ("validate", "predict-inbox")]
    found += [Plan("interrupt", "main", command) for command in ("predict", "validate")]
    found += [
        Plan(how, "out", command)
        for how in ("disk", "filesize")
        for command in ("predict", "validate")
    ]
    kinds = (
        "store",
        "made",
        "shard",
        "plan",
        "record",
        "summary",
        "results",
        "viral",
        "embeddings",
        "telemetry",
        "mark",
    )
    found += [Plan("flip", kind) for kind in kinds] + [Plan("cut", kind) for kind in kinds]
    found += [
        Plan(how, kind)
        for how in ("zero", "remove")
        for kind in ("store", "shard", "record", "summary", "results")
    ]
    found += [
        Plan(how, kind, "validate")
        for how in ("flip", "cut")
        for kind in ("store", "baseline", "report")
    ]
    found += [
        Plan("flip", kind, "validate") for kind in ("history", "results", "summary", "record")
    ]
    found += [Plan("flip", "ledger", "predict-inbox"), Plan("cut", "ledger", "predict-inbox")]
    found += [
        Plan("twin", kind)
        for kind in ("same", "other reads", "other reads --force", "other threshold")
    ]
    found += [
        Plan("twin", f"{kind} while the first rests") for kind in ("same", "other reads --force")
    ]
    found += [Plan("twin", kind, "validate") for kind in ("same", "other reads --force")]
    found += [Plan("rewrite", whom) for whom in ("main", "all")]
    found += [Plan("odd", "files", "predict-inbox")]
    of_cluster = [
        ("kill", whom)
        for whom in ("dask worker", "nanny", "tree", "worker", "scheduler", "main", "all")
    ]
    of_cluster += [("stop", whom) for whom in ("dask worker", "tree", "main")] + [
        ("terminate", "main")
    ]
    for how, whom in of_cluster:
        found += [
            Plan(how, whom, server="none", nodes=3, transfer=transfer) for transfer in (False, True)
        ]
    random.Random(0).shuffle(found)
    return tuple(found)


@dataclass(slots=True)
class Round:
    """What one round did and saw."""

    number: int
    plan: Plan
    server: str = ""
    at_s: float | None = None  # of the strike, after the start
    hit: bool = True
    not_run: str = ""  # why this machine cannot play it
    resumed: bool = False
    codes: list[int | None] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    messages: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.problems and not self.not_run


def line(one: Round) -> str:
    """A round in a line, for who watches."""
    if one.not_run and not one.problems:
        return f"{one.number:4d} not run {one.plan.name}: {one.not_run}"
    state = "good" if one.good else "BAD "
    at = "" if one.at_s is None else f" at {one.at_s:.1f} s"
    said_ = "; ".join(one.problems)
    return f"{one.number:4d} {state} {one.plan.name} [{one.server}]{at} codes {one.codes} {one.seconds:.0f} s {said_}"


def table(played: Sequence[Round]) -> str:
    """Markdown: one line a kind of round, then what was wrong in which round, then what was not run."""
    lines = ["| round | played | hit | run again | good |", "| --- | --- | --- | --- | --- |"]
    done = [one for one in played if one.problems or not one.not_run]
    for name in sorted({one.plan.name for one in done}):
        own = [one for one in done if one.plan.name == name]
        counts = (
            len(own),
            sum(r.hit for r in own),
            sum(r.resumed for r in own),
            sum(r.good for r in own),
        )
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    bad = [one for one in done if not one.good]
    lines += [
        "",
        f"{len(done) - len(bad)} of {len(done)} rounds good; {sum(r.hit for r in done)} strikes hit.",
    ]
    if bad:
        lines += ["", "| round | what was wrong |", "| --- | --- |"]
        lines += [
            f"| {r.number} {r.plan.name} ({r.server}) | {'; '.join(r.problems)[:400]} |"
            for r in sorted(bad, key=lambda one: one.number)
        ]
    for name, why in sorted({(one.plan.name, one.not_run) for one in played if one not in done}):
        count = sum(
            (one.plan.name, one.not_run) == (name, why) for one in played if one not in done
        )
        lines += ["", f"not run: {name}, {count} times: {why}"]
    return "\n".join(lines)
