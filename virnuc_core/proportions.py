"""Say how exactly a share is known from a sample, and how large a sample a target needs."""

import math
from dataclasses import dataclass
from typing import Final

# 95 % of a normal distribution lie within so many standard deviations of its mean; squared here
Z_SQUARED: Final = 1.959964**2
MAX_SHARE: Final = 0.999999  # no sample of a usable size shows that a share is higher


@dataclass(frozen=True, slots=True)
class Interval:
    """A confidence interval of a share, 0 to 1."""

    low: float
    high: float


def wilson_interval(share: float, n: int) -> Interval:
    """Return the 95 % confidence interval of a share that was measured on a sample.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference,
    Journal of the American Statistical Association 22 (1927).

    Args:
        share: The share in the sample, 0 to 1.
        n: The size of the sample, at least 1.
    """
    variance = share * (1.0 - share) + Z_SQUARED / (4 * n)
    half_width = math.sqrt(Z_SQUARED * variance / n)
    centre = share + Z_SQUARED / (2 * n)
    scale = 1.0 + Z_SQUARED / n
    low = (centre - half_width) / scale
    high = (centre + half_width) / scale
    # For these two shares, one end of the interval is exactly 0 or 1. Rounding could move it, and a
    # share of 1 would then fail a target of 1.
    if share == 0.0:
        low = 0.0
    if share == 1.0:
        high = 1.0
    return Interval(low, high)


def samples_needed(target: float) -> int:
    """Return the size of a sample that can show that a share is at least `target`.

    It is the smallest sample for which the confidence interval of a measured share of 1 begins at
    `target`.

    Args:
        target: The share to show, 0 to 1.
    """
    share = min(target, MAX_SHARE)
    return math.ceil(Z_SQUARED * share / (1.0 - share))
