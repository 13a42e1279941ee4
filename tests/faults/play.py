"""One round of the real command, struck at random, held to what an undisturbed run says.

A round is good when the struck command and the one that goes on after it end in time and in words, end in the very
files of an undisturbed run, leave no process, and leave alone what is not theirs. A round that this machine cannot
play is not run.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from .accounts import Account, plain_account
from .failing_disk import Failing, play_failing_disk
from .first_starts import play_first_starts
from .intrusions import play_intruder
from .limits import Limit, play_limit
from .rounds import Plan, Round, plans
from .scene import (
    NO_SERVER_HERE,
    NotRunError,
    Scene,
    Truth,
    Work,
    leaves,
    said,
    server,
)
from .strikes import LIMIT_S, Running, damage, left_over, make_room, small_disk, strike

ENDS_WITHIN_S: Final = 10.0  # of SIGTERM
STRANGERS: Final = ("notes.txt", "shards/mine.csv", "telemetry/mine.csv", "logs/mine.log")
NO_SERVER: Final = "no Prefect server answers at"
RUNS_ALONE: Final = "the run goes on without a Prefect server"
NODE: Final = ("dask worker", "nanny", "tree")
MAX_DRAWS: Final = 4  # of a round whose strikes hit nothing
OWN_WAYS: Final = (1, 2, 3, 4, 6)  # exit codes with one line that says why


class Play:
    """One round in its own folder."""

    def __init__(self, number: int, plan: Plan, scene: Scene, seed: int) -> None:
        self.scene, self.plan, self.seed = scene, plan, seed
        self.folder = scene.folder / f"round-{number:04d}"
        self.mark = mark_of(number, scene)
        self.work, self.truth = plan.work, Truth({}, "", 0.0, 0, 0)
        self._begin(number, 0)

    def _begin(self, number: int, n_misses: int) -> None:
        """Prepare the next draw of the round.

        Args:
            number: Of the round.
            n_misses: How many draws have hit nothing.
        """
        misses = f":{n_misses}" if n_misses else ""
        self.rng = random.Random(f"{self.seed}:{number}{misses}")
        self.sharpness = 2**n_misses  # what is drawn at random is drawn from a part so much smaller
        self.round = Round(number, self.plan, draws=n_misses + 1)
        self.out = self.folder / "place" / "out"
        self.servers, self.server = ExitStack(), self.scene.url
        self.account: Account | None = None  # whose processes the commands are; None: our own
        self.runs = 0

    def play(self) -> Round:
        """Play the round, and return it with what was wrong in it.

        One whose strike hits nothing is played again with a sharper one, a few times.
        """
        began_s = time.monotonic()
        for n_misses in range(MAX_DRAWS):
            self._begin(self.round.number, n_misses)
            self._play_draw()
            if self.round.state != "hit nothing":
                break
        self.round.seconds = time.monotonic() - began_s
        return self.round

    def _play_draw(self) -> None:
        """Play the round with what its random numbers draw, and remove its folder."""
        self.out.parent.mkdir(parents=True)
        with self.servers:
            try:
                self.truth = self.scene.truth(self.work)
                self._choose_server()
                if self.plan.plain_user:
                    self.account = self.servers.enter_context(plain_account(self.scene.folder))
                    os.chown(self.out.parent, self.account.uid, -1)
                self._play_kind()
            except NotRunError as error:
                self.round.not_run = str(error)
            except Exception as error:  # noqa: BLE001 - one round that the harness could not play must not end the others
                self.report_problem(f"the harness failed: {error}; {traceback.format_exc()[-300:]}")
            finally:  # also of a round that somebody interrupts
                self.round.problems += [f"process left: {line}" for line in left_over(self.mark)]
        shutil.rmtree(self.folder, ignore_errors=True)

    def _play_kind(self) -> None:
        """Play what the plan says."""
        if self.plan.how == "intrude":
            play_intruder(self)
        elif self.plan.how == "fail":
            play_failing_disk(self)
        elif self.plan.how == "race":
            play_first_starts(self)
        elif self.plan.how == "limit":
            play_limit(self)
        else:
            getattr(self, f"_{self.plan.how}", self._struck)()

    # --- parts of a round ---------------------------------------------------------------------------------------------

    def _choose_server(self) -> None:
        kind = self.plan.server
        if kind == "any":
            kind = "shared"
            if self.plan.command == "predict":
                kind = self.rng.choice(("shared", "embedded", "none", "none"))
                kind = kind if self.scene.url else "none"
            if self.plan.how == "filesize" and kind == "embedded":
                kind = "shared"  # its database has a file size of its own
        self.round.server = kind
        if kind == "own":
            home = self.folder / "own-server"
            self.server, self.own = self.servers.enter_context(
                server(home, self.scene.folder / "prefect.db", "own")
            )
        elif kind != "shared":
            self.server = kind
        elif not self.scene.url:
            raise NotRunError(NO_SERVER_HERE)

    def _devices(self) -> str:
        return self.rng.choice(("cpu:1", "cpu:2")) if self.plan.command != "validate" else "cpu:2"

    def start(
        self,
        work: Work | None = None,
        *more: str,
        limit: Limit | None = None,
        server: str = "",
        failing: Failing | None = None,
    ) -> Running:
        """Start a command of this round.

        Args:
            work: What it does; by default the work of the plan.
            more: Further words of the command line.
            limit: A limit of the system for its processes.
            server: An address, `embedded` or `none`; by default the server of the round.
            failing: Which calls of the system fail for it.
        """
        if "loader" in self.plan.whom:
            more = (*more, "--num-workers=1")
        words = self.scene.words(work or self.work, self.out, self._devices(), *more)
        return self.start_words(words, limit=limit, server=server, failing=failing)

    def start_words(
        self,
        words: list[str],
        *,
        limit: Limit | None = None,
        server: str = "",
        failing: Failing | None = None,
    ) -> Running:
        """Start any command line as one of this round; see `start`."""
        self.runs += 1
        folder = self.folder / f"run-{self.runs}"
        folder.mkdir()
        environment = failing.variables() if failing else {}
        if self.account is not None:
            environment |= self.account.own_folder(folder)
        return Running(
            self.scene,
            words,
            folder,
            self.mark,
            server or self.server,
            environment=environment,
            preexec=partial(_prepare_child, limit, self.account),
        )

    def ends(
        self, run: Running, allowed: Sequence[int], what: str, truth: Truth | None = None
    ) -> int | None:
        """Wait for a command; its exit code must be allowed, and what it says in order."""
        code, text = run.ends(), run.complained()
        self.round.codes.append(code)
        lines = [line for line in text.splitlines() if line.startswith("virnuc: ")]
        self.round.messages += lines
        if code is None:
            self.report_problem(f"{what}: hangs for {LIMIT_S:.0f} s; last words: {text[-200:]!r}")
        elif code not in allowed:
            self.report_problem(
                f"{what}: exit code {code}: {(lines or text.splitlines() or [''])[-1][:200]}"
            )
        elif code in OWN_WAYS and len(lines) != 1:
            self.report_problem(f"{what}: exit code {code} with {len(lines)} lines that say why")
        if "Traceback" in text:
            self.report_problem(
                f"{what}: a traceback: {text[text.index('Traceback') - 300 :][:3000]!r}"
            )
        if any("unexpected" in line for line in lines):
            self.report_problem(f"{what}: {lines[-1][:160]}")
        if code == 0:
            expected_output = (truth or self.truth).said
            counts = said(run.printed())
            if counts != expected_output:
                self.report_problem(f"{what}: told {counts!r} for {expected_output!r}")
        return code

    def compare(self, what: str, truth: Truth | None = None) -> None:
        """Compare every file that a user reads with that of an undisturbed run."""
        expected_files = (truth or self.truth).files
        actual = leaves(self.out)
        for name in sorted(expected_files.keys() | actual.keys()):
            is_foreign = self.plan.how == "odd" and name not in expected_files
            if name in STRANGERS or is_foreign or expected_files.get(name) == actual.get(name):
                continue
            if name not in actual:
                fault = "missing"
            elif name not in expected_files:
                fault = "left over"
            else:
                fault = "differs"
            contents = actual.get(name, "")
            if "cannot" in contents or "NaN" in contents:
                fault += f" ({contents})"
            self.report_problem(f"{what}: {name} {fault}")

    def resume(self, truth: Truth | None = None, work: Work | None = None) -> None:
        """Run the same command again, undisturbed: it must end with 0 in the right files."""
        self.round.resumed = True
        strangers = self._strangers() if self.rng.random() < 0.3 else {}
        healthy = self.scene.url if self.plan.server == "own" else ""
        if self.ends(self.start(work, server=healthy), (0,), "again", truth) == 0:
            self.compare("again", truth)
        for path, text in strangers.items():
            if not path.is_file() or path.read_text() != text:
                self.report_problem(
                    f"again: {path.relative_to(self.out)}, which is not ours, is gone"
                )

    def _strangers(self) -> dict[Path, str]:
        """Files of others in the directory."""
        if not self.out.is_dir():
            return {}
        strangers = {
            self.out / name: name for name in STRANGERS if (self.out / name).parent.is_dir()
        }
        for path, text in strangers.items():
            path.write_text(text)
        return strangers

    def report_problem(self, problem: str) -> None:
        """Note something that was wrong in this round, once."""
        if problem not in self.round.problems:
            self.round.problems.append(problem)

    # --- kinds of rounds ----------------------------------------------------------------------------------------------

    def _struck(self) -> None:
        """Kill, stop, terminate or interrupt a process."""
        kind, whom, process = self.plan.how, self.plan.whom, self.start()
        if whom.startswith("after "):
            stopped_process = whom.split()[1]
            at_s, _ = self._strike(process, "stop", stopped_process)
            time.sleep(self.rng.random())
            _, struck_s = strike(process, kind, "main", 0.0, self.rng)
        else:
            at_s, struck_s = self._strike(process, kind, whom)
        self.round.at_s = at_s
        self.round.hit = at_s is not None
        allowed_codes = self._allowed_codes(process)
        is_ended = kind in ("terminate", "interrupt") or -9 in allowed_codes
        if at_s is not None and is_ended and at_s < 2.0:
            allowed_codes = (*allowed_codes, -15, -2, -9)  # before it could hear
        code = self.ends(process, allowed_codes, "struck")
        if kind in ("terminate", "interrupt") and at_s is not None:
            took_s = time.monotonic() - struck_s
            if took_s > ENDS_WITHIN_S:
                self.report_problem(f"struck: ended {took_s:.0f} s after it was told to")
        if code == 0:
            self.compare("struck")
        self.resume()

    def _allowed_codes(self, run: Running) -> tuple[int, ...]:
        """Return the exit codes that a struck command may end with."""
        kind = self.plan.how
        whom = self.plan.whom
        if whom == "server" and run.ends() is not None:
            # The server may have gone before there was a run. Only a named one stops the command.
            complaints = run.complained()
            is_stopped = NO_SERVER in complaints and RUNS_ALONE not in complaints
            return (1,) if is_stopped else (0,)
        is_command_killed = kind == "kill" and whom.startswith(("main", "after "))
        if whom == "all" or is_command_killed:
            return (0, -9)
        if whom == "scheduler" or (kind == "stop" and whom in NODE):
            return (0, 4)  # nothing is begun on a node that does not answer
        if whom in ("server", "worker", "loader", *NODE) or (kind, whom) == ("stop", "main"):
            return (0,)  # replaced, or nothing that the results need
        if kind in ("terminate", "interrupt"):
            return (0, 130)
        return (0, 1)

    def _strike(self, run: Running, how: str, whom: str) -> tuple[float | None, float]:
        """Hit a process of this round; return when, as `strike` does."""
        parts = 4
        if whom in ("main", "all", "server"):
            parts = 1
        elif "staging" in whom:
            parts = 20
        if self.plan.nodes:
            parts = 3  # the first of its nodes is there late
        spread_s = self.truth.seconds / parts / self.sharpness**2
        if whom == "server" and self.plan.server == "own":
            time.sleep(self.rng.random() * spread_s)
            self.own.kill() if how == "kill" else self.own.send_signal(19)
            return time.monotonic() - run.began_s, time.monotonic()
        return strike(run, how, whom, spread_s, self.rng)

    _kill = _stop = _terminate = _interrupt = _struck

    def _disk(self) -> None:
        """Play on a disk that is full sooner or later."""
        with small_disk(
            self.folder / "disk",
            int(self.rng.uniform(8_192, self.truth.nbytes * 1.1 / self.sharpness)),
        ) as mount_point:
            if not mount_point:
                raise NotRunError("a small disk cannot be mounted here")
            self.out = self.folder / "disk" / "out"
            self._full(self.start())
            make_room(self.folder / "disk")
            self.resume()

    def _filesize(self) -> None:
        """Play with a limit: no file may become longer than a random one of those it makes."""
        exponent = self.rng.random() / self.sharpness
        room = int(4096 * (self.truth.largest / 4096) ** exponent)
        self._full(self.start(limit=Limit(resource.RLIMIT_FSIZE, room)))
        self.resume()

    def _full(self, run: Running) -> None:
        code = self.ends(run, (0, 1), "full")
        self.round.hit = code != 0
        messages = [line for line in run.complained().splitlines() if line.startswith("virnuc: ")]
        message = messages[0] if messages else ""
        if code == 1 and str(self.out) not in message:
            self.report_problem(f"full: does not name what could not be written: {message[:160]}")
        if code == 0:
            self.compare("full")

    def _flip(self) -> None:
        """Damage one file of a complete run, or of one that was killed."""
        first_run = self.start()
        incomplete = (
            self.plan.whom in ("store", "shard", "plan", "record")
            and self.rng.random() < 0.3 / self.sharpness**2
        )
        if incomplete:
            self._strike(first_run, "kill", "main")
        self.ends(first_run, (0, -9), "first")
        victim = damage(self.out, self.plan.how, self.plan.whom, self.rng)
        self.round.hit = victim is not None
        second_run = self.start()
        code = self.ends(second_run, (0, *OWN_WAYS), "again")
        if code == 0:
            self.compare("again")
        elif victim is not None:
            if victim.name not in second_run.complained():
                self.report_problem(
                    f"again: refused without naming {victim.name}: {second_run.complained()[-160:]}"
                )
            self.round.resumed = True
            if self.ends(self.start(None, "--force"), (0,), "with --force") == 0:
                self.compare("with --force")

    _cut = _zero = _remove = _flip

    def _twin(self) -> None:
        """Start a second run in the same directory, some time after the first.

        What stays must be of the last run that ended well.
        """
        twin_work = Work(
            self.plan.command,
            "b" if "reads" in self.plan.whom else "a",
            int("threshold" in self.plan.whom),
        )
        truths = self.truth, self.scene.truth(twin_work)
        extra_options = ["--force"] if "--force" in self.plan.whom else []
        first_run = self.start()
        rests = "rests" in self.plan.whom
        if rests:  # at a moment at which it surely works
            while first_run.alive and not self.out.exists():
                time.sleep(0.001)
            self._while_it_writes(first_run, 2)  # its lease is there
            first_run.process.send_signal(signal.SIGSTOP)
        else:
            time.sleep(self.rng.random() * self.truth.seconds)
        self.round.at_s = time.monotonic() - first_run.began_s
        first_works = not (self.out / "summary.json").exists()  # its last file is missing
        second = self.start(twin_work, *extra_options)
        if rests:
            second.ends()
            first_run.process.send_signal(signal.SIGCONT)
        deadline, ended_processes = time.monotonic() + LIMIT_S, list[int]()
        while len(ended_processes) < 2 and time.monotonic() < deadline:
            ended_processes += [
                i
                for i, run in enumerate((first_run, second))
                if i not in ended_processes and not run.alive
            ]
            time.sleep(0.01)
        codes = [
            self.ends(run, (0, 2), name, truth)
            for run, name, truth in zip(
                (first_run, second), ("first", "second"), truths, strict=True
            )
        ]
        well = [i for i in ended_processes if codes[i] == 0]
        if not well:
            self.report_problem("neither of the two runs ended well")
            return
        if rests and first_works and codes[1] == 0:
            self.report_problem("the second wrote where the first was at work")
        self.compare("both", truths[well[-1]])
        self.resume(truths[well[-1]], (self.work, twin_work)[well[-1]])

    def _while_it_writes(self, run: Running, least: int = 0) -> None:
        """Wait until some of the files that appear and go one after the other have done so."""
        n_changes = self.rng.randint(least, 10)
        last_change = self.out.stat().st_mtime_ns
        while n_changes and run.alive:
            change = self.out.stat().st_mtime_ns
            if change != last_change:
                n_changes -= 1
                last_change = change
            time.sleep(0.001)

    def _rewrite(self) -> None:
        """Judge a complete run at another threshold, and kill it meanwhile."""
        new_work = Work(self.plan.command, threshold=1)
        self.ends(self.start(), (0,), "first")
        second = self.start(new_work)
        self._while_it_writes(second)
        self.round.at_s, _ = strike(second, "kill", self.plan.whom, 0.01, self.rng)
        self.round.hit = self.round.at_s is not None
        self.ends(second, (0, -9), "struck", self.scene.truth(new_work))
        self.resume(self.scene.truth(new_work), new_work)

    def _odd(self) -> None:
        """Predict an inbox with files that nobody can predict among good ones."""
        name = f"odd-{self.round.number}"
        inbox = shutil.copytree(self.scene.reads("inbox"), self.scene.reads(name))
        (inbox / "bad.fasta").write_text("no reads\n")
        (inbox / "bad.fastq.gz").write_bytes(self.rng.randbytes(500))
        (inbox / "bad-directory.fasta").mkdir()
        (inbox / "bad-link.fasta").symlink_to("nowhere")
        shutil.copy(inbox / "s0.fasta.gz", bytes(inbox) + b"/bad-\xff.fasta.gz")
        (inbox / "bad-shut.fasta").write_text(">x\nACGT\n")
        (inbox / "bad-shut.fasta").chmod(0)
        for start_name in ("first", "again"):
            self.ends(self.start(Work(self.plan.command, name)), (0,), start_name)
        self.compare("again")


def _prepare_child(limit: Limit | None, account: Account | None) -> None:
    """Give up rights in a child before it becomes the command."""
    if account is not None:
        account.enter()
    if limit is not None:
        resource.setrlimit(limit.resource, (limit.value, limit.value))


def mark_of(number: int, scene: Scene) -> str:
    """Return the mark that every process of a round bears.

    Whatever bears it is killed after the round. So it has the whole path of the scene: test
    processes side by side have scenes in folders of the same name.
    """
    return f"{scene.folder}-{number}"


def play(number: int, scene: Scene, seed: int, plan: Plan | None = None) -> Round:
    """Play round `number`; the kind is its turn's unless one is given."""
    all_plans = plans()
    return Play(number, plan or all_plans[number % len(all_plans)], scene, seed).play()
