"""Many numbers to text at once: each float32 in the fewest digits that read back as the same float32."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

PLACES: Final = 12  # decimals of the widest number the fast way writes: nine digits after 0.000
FEWEST, MOST = 6, 9  # significant digits: six always survive a float32, nine always suffice
LEAST: Final = 1e-4  # below it numbers are written with an exponent

_UNSURE: Final = 1e-6  # how near to a half a rounding is left to the slow way; float64 errs by 2e-7 at most here
_POWERS: Final = 10.0 ** np.arange(PLACES + 1)
_WHOLE_POWERS: Final = 10 ** np.arange(PLACES + 1, dtype=np.int64)
_TAIL: Final = (1 << 29) - 1  # bits a float64 has beyond a float32
_BORDER: Final = 1 << 28  # the tail of a number half way between two float32
_BLOCK: Final = 32_768  # numbers at a time, so that the columns stay in the cache
_WITH_POINT: Final = np.array([f"0.{i:04d}" for i in range(10_000)])
_FOUR_DIGITS: Final = np.array([f"{i:04d}" for i in range(10_000)])
_NUMBER: Final = np.dtype([("first", "U6"), ("middle", "U4"), ("last", "U4")])


def shortest(values: NDArray[np.float32]) -> list[str]:
    """What `str` gives for each float32, twice as fast for numbers between 0.0001 and 1.

    >>> shortest(np.array([0.1, 1 / 3, 1.0, 2.5e-8], dtype=np.float32))
    ['0.1', '0.33333334', '1.0', '2.5e-08']
    """
    texts: list[str] = []
    for low in range(0, len(values), _BLOCK):
        texts += _block(values[low : low + _BLOCK])
    return texts


def _block(values: NDArray[np.float32]) -> list[str]:
    exact = values.astype(np.float64)
    usual = (exact >= LEAST) & (exact < 1)
    digits, places, sure = _digits(np.where(usual, exact, 0.5), values)
    texts = _spelled(digits, places)
    for i in np.flatnonzero(~(usual & sure)).tolist():
        texts[i] = str(values[i])
    return texts


def _digits(
    exact: NDArray[np.float64], values: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Each number's shortest decimal as a whole number of 10^-12, its decimals, and whether both are certain."""
    magnitude = np.floor(np.log10(exact)).astype(np.int64)
    digits = np.zeros(len(exact), dtype=np.int64)
    decimals = np.zeros(len(exact), dtype=np.int64)
    sure = np.zeros(len(exact), dtype=bool)
    for count in range(MOST, FEWEST - 1, -1):
        places = np.clip(count - 1 - magnitude, 1, PLACES)
        power = _POWERS[places]
        scaled = exact * power
        whole = np.rint(scaled)
        back = whole / power
        same = back.astype(np.float32) == values
        # a product near a half may have been rounded to the wrong side, a quotient onto the border of two float32
        doubtful = (np.abs(scaled - whole) > 0.5 - _UNSURE) | (back.view(np.int64) & _TAIL == _BORDER)
        digits = np.where(same, whole.astype(np.int64) * _WHOLE_POWERS[PLACES - places], digits)
        decimals = np.where(same, places, decimals)
        sure = (sure | same) & ~doubtful
    sure &= digits // _WHOLE_POWERS[PLACES - decimals] % 10 != 0  # fewer digits than were tried
    return digits, decimals, sure


def _spelled(digits: NDArray[np.int64], decimals: NDArray[np.int64]) -> list[str]:
    """Whole numbers of 10^-12, each below one, as `0.…` with so many decimals."""
    numbers = np.empty(len(digits), dtype=_NUMBER)
    upper, lower = np.divmod(digits, 10**8)
    middle, last = np.divmod(lower, 10**4)
    numbers["first"], numbers["middle"], numbers["last"] = _WITH_POINT[upper], _FOUR_DIGITS[middle], _FOUR_DIGITS[last]
    letters = numbers.view(np.uint32).reshape(len(digits), -1)
    letters *= np.arange(2 + PLACES) < 2 + decimals[:, None]  # the letter 0 ends a text
    texts: list[str] = numbers.view(f"U{2 + PLACES}").tolist()
    return texts
