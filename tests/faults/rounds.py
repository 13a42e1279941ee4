"""Which kinds of rounds there are, and the texts about rounds that were played."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .scene import Work

# Kinds of files that a run reads again.
FILE_KINDS = (
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


@dataclass(frozen=True, slots=True)
class Plan:
    """One kind of round."""

    # kill, stop, terminate, interrupt, disk, filesize, flip, cut, zero, remove, twin, rewrite, odd,
    # intrude (another user), fail (calls of the system), race (many first starts), limit (ulimit)
    how: str
    whom: str  # a kind of process, of file, of second run
    command: str = "predict"
    server: str = "any"  # any, none, embedded, own (a server of this round's own)
    nodes: int = 0  # of a cluster on this machine
    transfer: bool = False  # its files go through Dask
    starts: int = 20  # commands that start at once, of a race
    plain_user: bool = False  # the command runs under a user id that is not root's

    @property
    def work(self) -> Work:
        """Return what an undisturbed round does."""
        reads = "inbox" if self.command == "predict-inbox" else "a"
        if self.how == "race":
            reads = "b"  # the smaller ones
        return Work(self.command, reads, nodes=self.nodes, transfer=self.transfer)

    @property
    def name(self) -> str:
        """Return the name that the table shows."""
        name = f"{self.command}: {self.how} {self.whom}"
        if self.server != "any":
            name += f" ({self.server} server)"
        if self.nodes:
            name += " of a cluster"
        if self.transfer:
            name += " by transfer"
        if self.plain_user:
            name += " as a plain user"
        return name

    @property
    def needs_prefect(self) -> bool:
        """Return whether it can only be played where Prefect is installed."""
        return self.command != "predict" or self.server not in ("any", "none")


def plans() -> tuple[Plan, ...]:
    """Return every kind of round, mixed so that similar ones lie apart."""
    kinds = [
        *_kill_and_stop_plans(),
        *_server_plans(),
        *_signal_plans(),
        *_full_disk_plans(),
        *_damage_plans(),
        *_second_run_plans(),
        *_cluster_plans(),
        *_intruder_plans(),
        *_failing_disk_plans(),
        *_first_start_plans(),
        *_limit_plans(),
    ]
    random.Random(0).shuffle(kinds)
    return tuple(kinds)


def _kill_and_stop_plans() -> list[Plan]:
    """Return rounds in which a process of the run is killed or stopped."""
    kinds = [Plan("kill", whom) for whom in ("main", "all", "worker", "staging")]
    kinds += [Plan("kill", f"main while {kind}") for kind in ("staging", "worker")]
    kinds += [
        Plan("kill", "main while baseline", "validate"),
        Plan("terminate", "main while staging"),
        Plan("kill", "loader"),
        Plan("stop", "loader"),
    ]
    for whom in ("main", "all", "worker", "staging", "baseline"):
        kinds.append(Plan("kill", whom, "validate"))
    kinds += [Plan("kill", whom, "predict-inbox") for whom in ("main", "all", "worker")]
    kinds += [Plan("stop", whom) for whom in ("main", "worker", "staging")]
    kinds += [Plan("stop", whom, "validate") for whom in ("worker", "staging", "baseline")]
    kinds.append(Plan("stop", "worker", "predict-inbox"))
    return kinds


def _server_plans() -> list[Plan]:
    """Return rounds in which the Prefect server is killed or stopped."""
    kinds = []
    for kind in ("kill", "stop"):
        kinds += [Plan(kind, "server", "predict", server) for server in ("embedded", "own")]
    kinds.append(Plan("kill", "server", "validate", "embedded"))
    kinds.append(Plan("stop", "server", "validate", "own"))
    return kinds


def _signal_plans() -> list[Plan]:
    """Return rounds in which a user or a scheduler asks the run to end."""
    victims = ("main", "after worker stopped", "after staging stopped")
    kinds = [Plan("terminate", whom) for whom in victims]
    for server in ("embedded", "own"):
        kinds.append(Plan("terminate", "after server stopped", "predict", server))
    kinds += [Plan("terminate", "main", command) for command in ("validate", "predict-inbox")]
    kinds += [Plan("interrupt", "main", command) for command in ("predict", "validate")]
    return kinds


def _full_disk_plans() -> list[Plan]:
    """Return rounds in which a disk is full, or a file may not become longer."""
    kinds = []
    for kind in ("disk", "filesize"):
        kinds += [Plan(kind, "out", command) for command in ("predict", "validate")]
    return kinds


def _damage_plans() -> list[Plan]:
    """Return rounds in which a file of the run is damaged or removed."""
    kinds = []
    for kind in ("flip", "cut"):
        kinds += [Plan(kind, file) for file in FILE_KINDS]
    for kind in ("zero", "remove"):
        files = ("store", "shard", "record", "summary", "results")
        kinds += [Plan(kind, file) for file in files]
    for kind in ("flip", "cut"):
        kinds += [Plan(kind, file, "validate") for file in ("store", "baseline", "report")]
    for file in ("history", "results", "summary", "record"):
        kinds.append(Plan("flip", file, "validate"))
    kinds += [Plan(kind, "ledger", "predict-inbox") for kind in ("flip", "cut")]
    return kinds


def _second_run_plans() -> list[Plan]:
    """Return rounds with a second run in the same directory, and one with odd files in an inbox."""
    seconds = ("same", "other reads", "other reads --force", "other threshold")
    kinds = [Plan("twin", second) for second in seconds]
    for second in ("same", "other reads --force"):
        kinds.append(Plan("twin", f"{second} while the first rests"))
    kinds += [Plan("twin", second, "validate") for second in ("same", "other reads --force")]
    kinds += [Plan("rewrite", whom) for whom in ("main", "all")]
    kinds.append(Plan("odd", "files", "predict-inbox"))
    return kinds


def _cluster_plans() -> list[Plan]:
    """Return rounds on a cluster of three nodes, with and without a shared file system."""
    killed_processes = ("dask worker", "nanny", "tree", "worker", "scheduler", "main", "all")
    strikes = [("kill", whom) for whom in killed_processes]
    strikes += [("stop", whom) for whom in ("dask worker", "tree", "main")]
    strikes.append(("terminate", "main"))
    kinds = []
    for kind, whom in strikes:
        for transfer in (False, True):
            kinds.append(Plan(kind, whom, server="none", nodes=3, transfer=transfer))
    return kinds


def _intruder_plans() -> list[Plan]:
    """Return rounds in which a second user of the machine attacks."""
    commands = ("predict", "validate", "predict-inbox")
    kinds = [Plan("intrude", "server", command, "embedded") for command in commands]
    kinds.append(Plan("intrude", "cluster", server="none", nodes=2))
    kinds.append(Plan("intrude", "report", "validate"))
    for whom in ("shared directory", "directory"):
        kinds += [Plan("intrude", whom, command) for command in commands]
        kinds.append(Plan("intrude", whom, server="none", plain_user=True))
    kinds.append(Plan("intrude", "server", server="embedded", plain_user=True))
    kinds.append(Plan("intrude", "cluster", server="none", nodes=2, plain_user=True))
    return kinds


def _failing_disk_plans() -> list[Plan]:
    """Return rounds in which calls of the system fail for one kind of file."""
    files = (
        "shards",
        "store",
        "staging record",
        "plan",
        "record",
        "summary",
        "marker and lease",
        "results",
        "verdicts",
        "embeddings",
        "telemetry",
        "logs",
        "models",
        "reads",
        "anything",
    )
    kinds = [Plan("fail", file) for file in files]
    kinds.append(Plan("fail", "Prefect's home", server="embedded"))
    for file in ("baseline", "report", "history", "anything"):
        kinds.append(Plan("fail", file, "validate"))
    kinds += [Plan("fail", file, "predict-inbox") for file in ("shards", "reads", "anything")]
    kinds.append(Plan("fail", "anything", server="none", plain_user=True))
    return kinds


def _first_start_plans() -> list[Plan]:
    """Return rounds in which many commands start at once where nothing has been made yet."""
    homes = ("a new home", "an older database")
    kinds = [Plan("race", home, server="embedded") for home in homes]
    kinds.append(Plan("race", "a new home", server="none"))
    return kinds


def _limit_plans() -> list[Plan]:
    """Return rounds under a limit of memory or of processes. Root has no limit of processes."""
    kinds = [Plan("limit", "address space", server="none")]
    for resource in ("address space", "processes"):
        kinds.append(Plan("limit", resource, server="none", plain_user=True))
    kinds.append(Plan("limit", "processes", server="embedded", plain_user=True))
    return kinds


@dataclass(slots=True)
class Round:
    """What one round did and saw."""

    number: int
    plan: Plan
    server: str = ""
    at_s: float | None = None  # of the strike, after the start
    hit: bool = True
    draws: int = 1  # how often the strike was drawn: again after one that hit nothing
    not_run: str = ""  # why this machine cannot play it
    resumed: bool = False
    codes: list[int | None] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    messages: list[str] = field(default_factory=list)
    traps: list[str] = field(default_factory=list)  # what was drawn, for the person who repeats it

    @property
    def state(self) -> str:
        """Return what came of it: `good`, `hit nothing`, `bad` or `not run`.

        A strike that hits nothing shows nothing, so its round is not good.
        """
        if self.problems:
            return "bad"
        if self.not_run:
            return "not run"
        return "good" if self.hit else "hit nothing"

    @property
    def good(self) -> bool:
        """Return whether its strike hit, and nothing was wrong."""
        return self.state == "good"

    @property
    def played(self) -> bool:
        """Return whether it was played, or failed in the attempt."""
        return self.state != "not run"


def line(result: Round) -> str:
    """Return one line about a round, for the person who watches."""
    name = result.plan.name
    if not result.played:
        return f"{result.number:4d} not run {name}: {result.not_run}"
    state = "BAD" if result.state == "bad" else result.state
    moment = "" if result.at_s is None else f" at {result.at_s:.1f} s"
    drawn = f" ({'; '.join(result.traps)})" if result.traps else ""
    again = f" drawn {result.draws} times" if result.draws > 1 else ""
    ending = f"codes {result.codes} {result.seconds:.0f} s{again}{drawn}"
    problems = "; ".join(result.problems)
    return f"{result.number:4d} {state:4s} {name} [{result.server}]{moment} {ending} {problems}"


def table(results: Sequence[Round]) -> str:
    """Return a Markdown table of kinds of rounds, then what was wrong, then what was not run."""
    played_rounds = [result for result in results if result.played]
    lines = ["| round | played | good | hit nothing | bad |", "| --- | --- | --- | --- | --- |"]
    for name in sorted({result.plan.name for result in played_rounds}):
        rounds_of_kind = [result for result in played_rounds if result.plan.name == name]
        lines.append(_table_row(name, rounds_of_kind))
    states = Counter(result.state for result in played_rounds)
    lines.append("")
    lines.append(
        f"{states['good']} of {len(played_rounds)} rounds good; "
        f"{states['hit nothing']} hit nothing; {states['bad']} bad."
    )
    bad = sorted(
        (result for result in played_rounds if result.state == "bad"),
        key=lambda result: result.number,
    )
    if bad:
        lines += ["", "| round | what was wrong |", "| --- | --- |"]
    for result in bad:
        problems = "; ".join(result.problems)[:400]
        lines.append(f"| {result.number} {result.plan.name} ({result.server}) | {problems} |")
    reasons = Counter((result.plan.name, result.not_run) for result in results if not result.played)
    for (name, reason), count in sorted(reasons.items()):
        lines += ["", f"not run: {name}, {count} times: {reason}"]
    return "\n".join(lines)


def _table_row(name: str, results: Sequence[Round]) -> str:
    """Return the row of one kind of round."""
    states = Counter(result.state for result in results)
    return f"| {name} | {len(results)} | {states['good']} | {states['hit nothing']} | {states['bad']} |"
