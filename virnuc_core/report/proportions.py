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
    """Return the 95 % confidence interval of a share that was found in a sample.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference,
    Journal of the American Statistical Association 22 (1927).

    Args:
        share: The share that was found, 0 to 1.
        n: The size of the sample, at least 1.
    """
    variance = share * (1.0 - share) + Z_SQUARED / (4 * n)
    half_width = math.sqrt(Z_SQUARED * variance / n)
    centre = share + Z_SQUARED / (2 * n)
    scale = 1.0 + Z_SQUARED / n
    low = (centre - half_width) / scale
    high = (centre + half_width) / scale
    # These two ends are exact. Rounding may move them, and a share of 1 then fails a target of 1.
    if share == 0.0:
        low = 0.0
    if share == 1.0:
        high = 1.0
    return Interval(low, high)


def samples_needed(target: float) -> int:
    """Return the smallest sample whose interval begins at `target` if every member agrees.

    Args:
        target: The share that is to be shown, 0 to 1.
    """
    share = min(target, MAX_SHARE)
    return math.ceil(Z_SQUARED * share / (1.0 - share))
