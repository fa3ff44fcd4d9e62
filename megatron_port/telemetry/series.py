"""A number over the steps of a run, in constant memory: as many points as a picture can show."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

POINTS = 480
"""Most buckets of a series."""


@dataclass
class Bucket:
    """The values of some neighbouring steps."""

    first: int
    last: int
    count: int
    total: float
    least: float
    most: float

    @property
    def mean(self) -> float:
        """Mean of the finite values."""
        return self.total / self.count

    @property
    def step(self) -> float:
        """The middle."""
        return (self.first + self.last) / 2

    def join(self, other: Bucket) -> Bucket:
        """Both together."""
        return Bucket(self.first, other.last, self.count + other.count, self.total + other.total,
                      min(self.least, other.least), max(self.most, other.most))


@dataclass
class Series:
    """Values by step, added in the order of the steps; a later value of the same step joins its bucket."""

    buckets: list[Bucket] = field(default_factory=list)
    width: int = 1
    """Steps a bucket."""
    lost: int = 0
    """Values that were not finite."""
    last: float | None = None

    def add(self, step: int, value: float) -> None:
        """One more value."""
        if not isfinite(value):
            self.lost += 1
            return
        self.last = value
        new = Bucket(step, step, 1, value, value, value)
        if self.buckets and step // self.width == self.buckets[-1].first // self.width:
            self.buckets[-1] = self.buckets[-1].join(new)
            return
        self.buckets.append(new)
        while len(self.buckets) > POINTS:
            self.width *= 2
            joined: list[Bucket] = []
            for bucket in self.buckets:
                if joined and joined[-1].first // self.width == bucket.first // self.width:
                    joined[-1] = joined[-1].join(bucket)
                else:
                    joined.append(bucket)
            self.buckets = joined

    @property
    def mean(self) -> float | None:
        """Over all values; None: there is none."""
        count = sum(b.count for b in self.buckets)
        return sum(b.total for b in self.buckets) / count if count else None
