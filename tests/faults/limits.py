"""Rounds under a limit of the system: little memory, or few processes and threads."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .play import Play

MEBI: Final = 1 << 20
CODES: Final = (
    0,
    1,
    4,
)  # 6 would say that reads were left out, 2 and 3 that the user's files are wrong


@dataclass(frozen=True, slots=True)
class Limit:
    """What `ulimit` sets."""

    resource: int
    value: int


def play_limit(play: Play) -> None:
    """Play the round of a plan `limit`.

    The command ends in one line that says what was too little, or it works. What it leaves is gone
    on with when there is no limit any more.
    """
    limit = _draw_limit(play)
    run = play.start(limit=limit)
    code = play.ends(run, CODES, "limited")
    play.round.hit = code != 0
    if code == 0:
        play.compare("limited")
    play.resume()


def _draw_limit(play: Play) -> Limit:
    """Draw how much memory or how many processes there are; a sharper limit is tighter."""
    if play.plan.whom == "processes":
        count = play.rng.randint(1, max(1, 40 // play.sharpness))
        play.round.traps.append(f"{count} processes and threads")
        return Limit(resource.RLIMIT_NPROC, count)
    nbytes = int(play.rng.choice((700, play.rng.uniform(300, 3000 / play.sharpness))) * MEBI)
    play.round.traps.append(f"{nbytes // MEBI} MiB of addresses")
    return Limit(resource.RLIMIT_AS, nbytes)
