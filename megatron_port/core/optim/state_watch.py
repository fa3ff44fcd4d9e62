"""Hooks of a step that find silent corruption: gradients or state that anything but the step itself has changed.

:class:`StateWatch` is a no-op; ``ext.health.state_watch`` has the checks of ``numerics.state_check_interval``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch


class StateEntry(NamedTuple):
    """Range of a parameter in a flat tensor."""

    start: int
    """First element, in the flat tensor."""
    numel: int
    name: str
    """Canonical name of the parameter."""
    offset: int
    """Position of the element in the parameter's flattened local tensor."""


class StateTensor(NamedTuple):
    """A flat tensor of the state. ``kind``: weight, fp32 master, exp_avg or exp_avg_sq."""

    kind: str
    flat: torch.Tensor
    """1-D and contiguous, of 2, 4 or 8 bytes per element."""
    entries: Sequence[StateEntry]


class Damage(Protocol):
    """Damage that one rank found; as a string, where it is."""

    @property
    def how(self) -> str:
        """Description of the fault."""

    @property
    def cause(self) -> str:
        """Possible causes, and what to do."""


class StateWatch:
    """Checks that only reductions change gradients and only updates change state; this one checks nothing. No method
    but :meth:`damage` waits for the device."""

    interval = 0
    """Updates between checks; 0: never."""

    def __init__(self, device: torch.device) -> None:
        self._none = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def differing(self) -> torch.Tensor:
        """Rows and copies that differed in any check so far, an int64 scalar on the device."""
        return self._none

    # -- gradients ---------------------------------------------------------------------------------------------------

    def begin(self, *, early: bool) -> None:
        """Begin a step; ``early`` False: a replay, which changes nothing."""

    def starting(self, bucket: Any, flat: torch.Tensor) -> None:
        """Take row sums of local gradients that are about to be reduced."""

    def hold(self, buckets: Sequence[Any]) -> None:
        """Hash reduced gradients, which nobody may change until they are released."""

    def release(self, buckets: Sequence[Any]) -> None:
        """Compare held gradients with their hashes, before something is added to them or the update reads them."""

    def reduced(self, buckets: Sequence[Any]) -> None:
        """Check the row sums of reduced gradients, before shards are reduced any further."""

    def verify_gradients(self) -> None:
        """Release everything and compare copies over their groups: right before the update. Collective."""

    def replays(self) -> None:
        """Note that steps are captured and replayed, so that their reductions cannot be looked at."""

    def verify_replayed(self) -> None:
        """Compare copies after the passes of a replayed step. Collective."""

    # -- state -------------------------------------------------------------------------------------------------------

    def verify_state(self) -> torch.Tensor:
        """Compare the state with its hashes after the last update, before this one changes it.

        Returns the number of rows that differed in any check so far, an int64 scalar on the device.
        """
        return self._none

    def hash_state(self, *, gathering: bool = False) -> None:
        """Hash what this rank owns after an update. ``gathering``: other shards are hashed by :meth:`gathered`."""

    def gathered(self, bucket: Any) -> None:
        """Hash a bucket's other shards, which have been gathered (on a GPU: in the stream's order)."""

    def damage(self) -> Damage | None:
        """Return what the last checks found on this rank; None: nothing.

        Waits for the device. Where copies differ, collective over their group.
        """
        return None


