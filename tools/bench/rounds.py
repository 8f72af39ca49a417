"""Statistics of the rounds of one measurement: a median, a spread, and whether a target is met.

A machine's speed may change by a third from minute to minute, so two sides are compared round by round, and a ratio is the median of the
ratios of all rounds. Its spread is a confidence interval of that median by the sign test: of n rounds the k-th smallest to the k-th
largest, with the largest k that still covers the true median in at least 92 % of all cases. Up to seven rounds that is the smallest
to the largest, which covers it in 1 - 2^(1 - n): 94 % for five rounds, but only 75 % for three.
"""

import math
import statistics

HELD, MISSED, OPEN = "held", "missed", "cannot be told"
COVERAGE = 0.92


class Rounds:
    """The values of one quantity, one per round."""

    def __init__(self, values):
        self.values = sorted(values)
        if not self.values:
            raise ValueError("a median needs at least one round")

    @property
    def median(self):
        return statistics.median(self.values)

    @property
    def spread(self):
        """The lower and the upper end of the interval described above."""
        skipped = _skipped(len(self.values))
        return self.values[skipped], self.values[-1 - skipped]

    def verdict(self, at_least=-math.inf, at_most=math.inf):
        """Met if the whole spread meets the target, missed if none of it does, and undecided otherwise."""
        low, high = self.spread
        if low >= at_least and high <= at_most:
            return HELD
        if high < at_least or low > at_most:
            return MISSED
        return OPEN

    def text(self, digits=3, unit=""):
        """The median with its spread: `1.020x (0.984 to 1.051)`."""
        low, high = self.spread
        return f"{self.median:.{digits}f}{unit} ({low:.{digits}f} to {high:.{digits}f})"


def ratios(over, under):
    """The ratio of two quantities in each common round."""
    if len(over) != len(under):
        raise ValueError(f"{len(over)} rounds on one side and {len(under)} on the other")
    return Rounds(first / second for first, second in zip(over, under))


def _skipped(count):
    """How many values at either end lie outside of the spread of `count` rounds."""
    skipped = 0
    while 2 * (skipped + 1) < count and _coverage(count, skipped + 1) >= COVERAGE:
        skipped += 1
    return skipped


def _coverage(count, skipped):
    """The probability that the median lies between the remaining values when `skipped` are left out at either end."""
    return 1 - 2 * sum(math.comb(count, below) for below in range(skipped + 1)) / 2**count
