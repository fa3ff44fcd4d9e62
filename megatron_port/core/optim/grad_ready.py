"""Counting of the gradients added to each bucket, to find when it is full."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class GradReadyTracker:
    """Tracker of buckets that fill up together, in one round after another.

    Each use of a parameter adds to its gradient once. The first round counts the uses in one pass, so none of its
    buckets is full before it ends. From then on a bucket is full as soon as each of its parameters has received that
    count times the number of passes in the round. Buckets are reported as full in their given order only: the order is
    then the same on all replicas, whatever the order in which gradients arrive.

    Args:
        buckets: (number, its parameters' indices), in the order in which they are to be full.
        name: of a parameter, for messages.
    """

    def __init__(self, buckets: Sequence[tuple[int, Sequence[int]]], name: Callable[[int], str] = str) -> None:
        self.numbers = [number for number, _ in buckets]
        self._indices = [list(indices) for _, indices in buckets]
        self._place = {index: i for i, indices in enumerate(self._indices) for index in indices}
        self._name = name
        self._uses: dict[int, int] | None = None
        self._passes = 1
        self._early = False
        self._next = len(buckets)
        self._seen: dict[int, int] = dict.fromkeys(self._place, 0)
        self._missing: list[int] = []

    def begin(self, passes: int, *, early: bool) -> None:
        """Begin a round of so many passes. ``early``: buckets may be full before its end."""
        self._passes, self._next = passes, 0
        self._seen = dict.fromkeys(self._place, 0)
        self._early = early and self._uses is not None
        if self._uses is not None:
            self._missing = [sum(self._uses[i] > 0 for i in indices) for indices in self._indices]

    def added(self, index: int) -> list[int]:
        """Count a gradient added to a parameter; return the numbers of the buckets that are full now.

        Raises:
            RuntimeError: it comes after the bucket may have been full; it would be lost.
        """
        self._seen[index] += 1
        if not self._early:
            return []
        assert self._uses is not None
        seen, wanted = self._seen[index], self._uses[index] * self._passes
        if seen > wanted:
            raise RuntimeError(
                f"{self._name(index)}: gradient {seen} of this step, and the first step had {wanted}: its bucket may "
                "have been reduced already"
            )
        if seen < wanted:
            return []
        self._missing[self._place[index]] -= 1
        full = self._next
        while full < len(self.numbers) and self._missing[full] == 0:
            full += 1
        out, self._next = self.numbers[self._next : full], full
        return out

    def rest(self) -> list[int]:
        """End the round; return the numbers of the buckets that have not been full in it."""
        if self._uses is None:
            self._uses = {index: n // self._passes for index, n in self._seen.items()}
        out, self._next = self.numbers[self._next :], len(self.numbers)
        return out
