"""What a step may tell of gradients and state, to find what anything but an update has changed.

The base class is a no-op. ``health.state_watch`` has the checks, where ``numerics.state_check_interval`` asks for them.
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
    """Looks whether anything but a reduction changes gradients, and anything but an update the state; this one does
    not look. Nothing waits for the device but :meth:`damage`."""

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
        """Look at gradients that are about to be reduced to shards."""

    def hold(self, buckets: Sequence[Any]) -> None:
        """Take reduced gradients that nobody may change until they are released."""

    def release(self, buckets: Sequence[Any]) -> None:
        """Compare held gradients with what they were: something is to be added to them, or the update reads them."""

    def reduced(self, buckets: Sequence[Any]) -> None:
        """Check the first sums of a step, all of which are complete, before any further ones."""

    def verify_gradients(self) -> None:
        """Release everything and compare copies over their groups: right before the update. Collective."""

    def replays(self) -> None:
        """Note that steps are recorded and replayed, so that their reductions cannot be looked at."""

    def verify_replayed(self) -> None:
        """Compare copies after the passes of a replayed step. Collective."""

    # -- state -------------------------------------------------------------------------------------------------------

    def verify_state(self) -> torch.Tensor:
        """Compare the state with what was recorded after the last update, before this one changes it.

        Returns the rows of it that differed in any check so far, an int64 scalar on the device.
        """
        return self._none

    def record_state(self, *, gathering: bool = False) -> None:
        """Take what this rank owns after an update; its weights too, unless a gather is still to bring them.

        ``gathering``: weights are yet to be gathered.
        """

    def gathered(self, bucket: Any) -> None:
        """Take a bucket's weights, which have come from the other replicas (on a GPU: in the stream's order)."""

    def damage(self) -> Damage | None:
        """Return what this rank has to say of the last checks; None: nothing.

        Waits for the device. Where copies differ, collective over their group.
        """
        return None


