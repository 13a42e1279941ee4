"""Rounds on a disk or a file server that fails for a while, by a library that is preloaded."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.failing_files import has_compiler

from .scene import NotRunError

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
CHANCES: Final = (100, 100, 30, 5)  # percentages of these calls
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
    if play.rng.random() < 0.5:
        _leave_unfinished(play)
    shards = _shards(play.out)
    numbers = play.rng.sample(ERRORS, play.rng.choice((1, 1, 2)))
    calls = play.rng.choice(CALLS)
    # Python repeats a call that was interrupted, so it must succeed at some time.
    chances = CHANCES[2:] if errno.EINTR in numbers else CHANCES
    chance = play.rng.choice(chances)
    is_lasting = play.rng.random() < 0.5
    play.round.traps.append(
        f"{'/'.join(errno.errorcode[number] for number in numbers)} of {calls}, {chance} %"
        f"{', for ever' if is_lasting else ', for a second'}"
    )

    run = play.start(failing=Failing(play, numbers, calls, chance))
    if play.rng.random() < 0.5:  # from the start: also what is read again first
        time.sleep(play.rng.random() * play.truth.seconds * 0.8)
    switch = play.folder / "failing"
    switch.touch()
    play.round.at_s = time.monotonic() - run.began_s
    if not is_lasting:
        log = play.folder / "failed-calls"
        while run.alive and not log.exists():
            time.sleep(0.01)
        time.sleep(1.0)
        switch.unlink()
    code = play.ends(run, CODES, "failing")
    switch.unlink(missing_ok=True)
    play.round.hit = (play.folder / "failed-calls").exists()
    if code == 0:
        play.compare("failing")
    elif code is not None:
        _require_system_words(play, run.complained(), numbers)
    _require_no_damage(play, shards)
    play.resume()
    _require_no_damage(play, shards)


class Failing:
    """Which calls of a run fail, as environment variables for its processes."""

    def __init__(self, play: Play, numbers: list[int], calls: str, chance: int) -> None:
        self._play, self._numbers, self._calls, self._chance = play, numbers, calls, chance

    def variables(self, home: Path) -> dict[str, str]:
        """Return the variables.

        Args:
            home: Prefect's folder of the run.
        """
        from tests.failing_files import failing_variables

        play = self._play
        place = PLACES[play.plan.whom].format(
            out=os.path.realpath(play.out), scene=play.scene.folder, home=home
        )
        variables = failing_variables(place, self._numbers, self._calls, play.folder / "failing")
        return variables | {
            "FAIL_CHANCE": str(self._chance),
            "FAIL_SEED": str(play.rng.randrange(1, 1 << 30)),
            "FAIL_LOG": str(play.folder / "failed-calls"),
        }


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
    return {str(path): path.stat().st_ino for path in out.rglob("shards/0*.h5")}


def _require_system_words(play: Play, text: str, numbers: list[int]) -> None:
    """Report that a command which has stopped does not say what the system said."""
    words = [os.strerror(number) for number in numbers]
    lines = [line for line in text.splitlines() if line.startswith("virnuc: ")]
    if not any(word in line for word in words for line in lines):
        play.report_problem(f"failing: none of {words} in {lines or text[-300:]}")


def _require_no_damage(play: Play, shards: dict[str, int]) -> None:
    """Report files that are called damaged, and finished shards that are gone or new."""
    for path in play.out.rglob("*"):
        if path.name.endswith(".damaged") or path.parent.name == "damaged":
            play.report_problem(f"called damaged: {path.relative_to(play.out)}")
    now = _shards(play.out)
    for name, inode in shards.items():
        if now.get(name) != inode:
            play.report_problem(f"computed again or gone: {Path(name).name}")
