"""Rounds on a disk or a file server that fails for a while, by a library that is preloaded.

An undisturbed run counts the calls of the system for one kind of file. The round then draws which of
them is the first to fail, so a round rarely hits nothing.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.changing_folders import paths_below
from tests.failing_files import ALL_CALLS, failing_variables, has_compiler

from .scene import NotRunError
from .strikes import shards_below

if TYPE_CHECKING:
    from .play import Play

# Errors that say nothing about the content of a file.
ERRORS: Final = (
    errno.ESTALE,
    errno.EIO,
    errno.EACCES,
    errno.ENOLCK,
    errno.ENOSPC,
    errno.EINTR,
)
# Which calls fail in one round; the letters are those of `failing_files`.
CALLS: Final = ("o", "r", "s", "k", "w", "m", "lud", "or", "ors", "wm", "orslkwmud", "orslkwmud")
# Percentages of these calls that fail, from the first failing call on.
CHANCES: Final = (100, 100, 30, 5)
LASTS: Final = ("one call", "five calls", "a second", "for ever")
CODES: Final = (0, 1, 2, 3, 4)  # 6 would say that reads were left out
# Texts in the paths of the files for which calls fail. {out}, {scene} and {home} are folders. Runs of
# an inbox and of a validation lie below {out}.
PLACES: Final = {
    "shards": "/shards/",
    "store": "orfs.h5",
    "staging record": "orfs.made.json",
    "plan": "plan.json",
    "record": "run.json",
    "summary": "summary.json",
    "marker and lease": "{out}/.virnuc",
    "results": "prediction_results",
    "verdicts": "reads.tsv",
    "embeddings": "embeddings.h5",
    "telemetry": "telemetry_",
    "logs": "/logs/worker-",
    "models": "{scene}/models/",
    "reads": "{scene}/reads-",
    "Prefect's home": "{home}/",
    "baseline": "{out}/baseline/",
    "report": "{out}/report/",
    "history": "history.jsonl",
    "anything": "{out}",
}


def play_failing_disk(play: Play) -> None:
    """Play the round of a plan `fail`: calls for one kind of file fail, for a second or for ever.

    The run may end well. Otherwise it stops in one line with the system's words. Nothing is called
    damaged, because nothing is.
    """
    if not has_compiler():
        raise NotRunError("no C compiler")
    is_unfinished = play.rng.random() < 0.5
    counts = _count_calls(play, is_unfinished=is_unfinished)
    if not counts:
        raise NotRunError("an undisturbed run makes no call for these files")
    if is_unfinished:
        _leave_unfinished(play)
    shards = _shards(play.out)
    trap = _draw_trap(play, counts)
    play.round.traps.append(trap.description)

    log, switch = trap.folder / "failed-calls", trap.folder / "failing"
    switch.touch()
    run = play.start(failing=trap)
    while run.alive and not log.exists():
        time.sleep(0.01)
    if log.exists():
        play.round.at_s = time.monotonic() - run.began_s
    if trap.lasts == "a second":
        time.sleep(1.0)
        switch.unlink()
    code = play.ends(run, CODES, "failing")
    switch.unlink(missing_ok=True)
    play.round.hit = log.exists()
    if code == 0:
        play.compare("failing")
    elif code is not None:
        _require_system_words(play, run.complained(), trap.numbers)
    _require_no_damage(play, shards)
    play.resume()
    _require_no_damage(play, shards)


@dataclass(frozen=True, slots=True)
class Failing:
    """Which calls of a run fail, for its processes."""

    folder: Path  # for the files through which the calls are counted and ended
    place: str  # text in the paths of the files
    numbers: tuple[int, ...]  # of the errors
    calls: str  # letters of `failing_files`
    first: int  # number of the first call that fails; with 0 the calls are only counted
    lasts: str = "for ever"
    chance: int = 100
    seed: int = 1

    @property
    def description(self) -> str:
        """Return what the person reads who repeats the round."""
        names = "/".join(errno.errorcode[number] for number in self.numbers)
        return f"{names} of {self.calls} from call {self.first}, {self.chance} %, {self.lasts}"

    def variables(self) -> dict[str, str]:
        """Return the environment variables with which the calls of a process fail."""
        variables = failing_variables(self.place, self.numbers, self.calls, self.folder / "failing")
        variables |= {
            "FAIL_COUNT": str(self.folder / "counted-calls"),
            "FAIL_LOG": str(self.folder / "failed-calls"),
            "FAIL_FIRST": str(self.first),
            "FAIL_CHANCE": str(self.chance),
            "FAIL_SEED": str(self.seed),
        }
        if self.lasts == "one call":
            variables["FAIL_LAST"] = str(self.first)
        elif self.lasts == "five calls":
            variables["FAIL_LAST"] = str(self.first + 4)
        return variables


def _open_folder(play: Play) -> Path:
    """Make a folder of the round in which the processes of every user may write."""
    folder = play.folder / "calls"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    return folder


def _place(play: Play) -> str:
    """Return the text in the paths of the files for which calls fail."""
    template = PLACES[play.plan.whom]
    if template == "{home}/":
        return f"{play.folder}/run-{play.runs + 1}/home/"  # of the command that starts next
    return template.format(out=os.path.realpath(play.out), scene=play.scene.folder)


def _count_calls(play: Play, *, is_unfinished: bool) -> Counter[str]:
    """Return how often an undisturbed run makes each call for the files of the plan.

    The run is played once for each kind of round, where the round is played afterwards.

    Args:
        play: The round.
        is_unfinished: The run goes on after one that was killed.
    """
    name = f"{play.plan.name} {play.round.server} {is_unfinished}"
    if name not in play.scene.counted_calls:
        if is_unfinished:
            _leave_unfinished(play)
        trap = Failing(_open_folder(play), _place(play), ERRORS, ALL_CALLS, first=0)
        play.ends(play.start(failing=trap), (0,), "counted")
        count_file = trap.folder / "counted-calls"
        letters = count_file.read_text() if count_file.exists() else ""
        play.scene.counted_calls[name] = Counter(letters)
        count_file.unlink(missing_ok=True)
        for path in play.out.parent.iterdir():  # the directory, and a history beside it
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return play.scene.counted_calls[name]


def _draw_trap(play: Play, counts: Counter[str]) -> Failing:
    """Draw which calls fail, and from which one on; a sharper trap begins earlier."""
    counted = {calls: sum(counts[letter] for letter in calls) for calls in CALLS}
    possible_calls = [calls for calls in CALLS if counted[calls]]
    calls = play.rng.choice(possible_calls or [ALL_CALLS])
    last_call = max(1, sum(counts[letter] for letter in calls) // play.sharpness)
    numbers = play.rng.sample(ERRORS, play.rng.choice((1, 1, 2)))
    lasts = play.rng.choice(LASTS)
    # Python repeats a call that was interrupted, so it must succeed at some time.
    chances = CHANCES[2:] if errno.EINTR in numbers and "call" not in lasts else CHANCES
    return Failing(
        _open_folder(play),
        _place(play),
        tuple(numbers),
        calls,
        first=play.rng.randint(1, last_call),
        lasts=lasts,
        chance=play.rng.choice(chances),
        seed=play.rng.randrange(1, 1 << 30),
    )


def _leave_unfinished(play: Play) -> None:
    """Leave an unfinished run with some shards, as a killed command does."""
    run = play.start()
    wanted = play.rng.randint(1, 4)
    while run.alive and len(_shards(play.out)) < wanted:
        time.sleep(0.01)
    run.process.kill()
    play.ends(run, (0, -9), "first")


def _shards(out: Path) -> dict[str, int]:
    """Return the inodes of the shards that are committed, by their path."""
    inodes = {}
    for path in shards_below(out):
        with suppress(FileNotFoundError):  # a run that goes on may remove it
            inodes[str(path)] = path.stat().st_ino
    return inodes


def _require_system_words(play: Play, text: str, numbers: Sequence[int]) -> None:
    """Report that a command which has stopped does not say what the system said."""
    words = [os.strerror(number) for number in numbers]
    lines = [line for line in text.splitlines() if line.startswith("virnuc: ")]
    if not any(word in line for word in words for line in lines):
        play.report_problem(f"failing: none of {words} in {lines or text[-300:]}")


def _require_no_damage(play: Play, shards: dict[str, int]) -> None:
    """Report files that are called damaged, and finished shards that are gone or new."""
    for path in paths_below(play.out):
        if path.name.endswith(".damaged") or path.parent.name == "damaged":
            play.report_problem(f"called damaged: {path.relative_to(play.out)}")
    now = _shards(play.out)
    for name, inode in shards.items():
        if now.get(name) != inode:
            play.report_problem(f"computed again or gone: {Path(name).name}")
