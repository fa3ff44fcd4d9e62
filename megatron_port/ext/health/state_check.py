"""Has anything but an update changed the training state? Hashes of weights, masters and moments from one update to the
next.

Under ZeRO each rank owns its own shard of masters and moments, so no replica exists to compare them with, and a flipped
bit in a weight lasts only until the next all-gather overwrites it: long enough for wrong gradients. So each rank hashes
what it holds right after an update (other replicas' weights: once gathered) and again right before the next one. What
differs was changed by the memory, the bus, or a stray write.

The hashes stay on the device; a step's single host synchronisation brings the number of differing rows along. A row is
16 KiB. From the difference of its two hashes one damaged word, and mostly its bit, can be computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_port.core.config.schema import BackendConfig, RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS
from megatron_port.core.dist.row_hashes import ROW, RowHashes, one_word, row_factors
from megatron_port.core.optim.state_watch import StateTensor
from megatron_port.core.registry import STEP_PARTS

NAMED = 4
"""Tensors and rows that a message names at most."""


GPU_TOKENS = 7500
"""Tokens of a replica's step that take a GPU as long as hashing its state twice. Measured on an H200 (451 million
parameters, gpu-session-nvidia-h200.json): a step of 16,384 tokens takes 94 ms, and 137 with both hashes. Those were
torch's; the own kernel moves a ninth of their bytes and was not timed."""


def chosen_interval(setting: int, *, tokens: int, device: torch.device) -> int:
    """Return ``numerics.state_check_interval`` with -1 resolved.

    Args:
        tokens: of a step, on one rank.
    """
    if setting >= 0:
        return setting
    return 1 if device.type == "cpu" else max(1, math.ceil(100 * GPU_TOKENS / tokens))


def check_of(config: RunConfig, ctx: ParallelContext) -> StateCheck:
    """Return the check that a run asks for."""
    tokens = config.batch.global_batch_size * config.model.seq_length // ctx.size(*REPLICAS)
    setting = config.numerics.state_check_interval
    return StateCheck(
        ctx.device, chosen_interval(setting, tokens=tokens, device=ctx.device), hashes_of(config.backend)
    )


def hashes_of(config: BackendConfig) -> Callable[[torch.device], RowHashes]:
    """Return the row hash function for a device: the own kernel, or torch's operations with the same result."""
    return functools.partial(STEP_PARTS.function("own row hashes"), config)


@dataclass(frozen=True)
class Damage:
    """Damage that one rank found."""

    kind: str
    places: tuple[str, ...]
    """Where, in words; the first row of each damaged tensor."""
    rows: int
    """Damaged rows over all tensors."""
    row_bytes: int = ROW * 4
    how: str = "changed between two updates, though no update did it"
    """Description of the fault."""
    cause: str = (
        "a bit flipped in this device's memory, or a stray write. Leave the host out, check the device's error counters"
    )
    """Possible causes, and what to do."""

    def __str__(self) -> str:
        more = f"; {self.rows} blocks of {self.row_bytes} bytes are damaged in all" if self.rows > 1 else ""
        return f"the {self.kind} of {'; '.join(self.places)}{more}"


class StateCheck:
    """Hash check of one rank's state tensors between two updates.

    Args:
        interval: updates between checks; 0: never.
        hashes: row hash function of a device.
    """

    def __init__(
        self, device: torch.device, interval: int, hashes: Callable[[torch.device], RowHashes] = RowHashes
    ) -> None:
        self.interval = interval
        self._device = device
        self._make = hashes
        self._hashes: dict[str, RowHashes] = {}
        """By type of device: the state may be offloaded to the host."""
        self._recorded: dict[tuple[str, int], tuple[StateTensor, torch.Tensor, torch.Tensor]] = {}
        """By kind and address: the tensor, its rows' hashes after the update, and those found at the last check."""
        self._before: list[tuple[StateTensor, torch.Tensor, torch.Tensor]] = []
        """Entries of ``_recorded`` for the state before the last update."""
        self.recording = False
        """The state of the last update is to be recorded."""
        self.differing = torch.zeros((), dtype=torch.int64, device=device)
        """Rows that differed in any check so far; on the device."""
        self._updates = 0

    def begin(self) -> bool:
        """Begin a check after an update: what was recorded no longer holds. Return whether to record this one."""
        self._before, self._recorded = list(self._recorded.values()), {}
        self._updates += 1
        self.recording = self.interval > 0 and self._updates % self.interval == 0
        return self.recording

    def record(self, tensors: Iterable[StateTensor]) -> None:
        """Hash tensors that only the next update may change. No host synchronisation."""
        for t in tensors:
            if t.flat.numel():
                hashes = self._hash_of(t)(t.flat)
                self._recorded[t.kind, t.flat.data_ptr()] = (t, hashes, hashes)

    @property
    def recorded(self) -> bool:
        """Whether there is anything to verify."""
        return bool(self._recorded)

    def _hash_of(self, t: StateTensor) -> RowHashes:
        kind = t.flat.device.type
        if kind not in self._hashes:
            self._hashes[kind] = self._make(t.flat.device)
        return self._hashes[kind]

    @torch.no_grad()
    def verify(self) -> None:
        """Hash the recorded tensors again and add rows that differ to ``differing``. No host synchronisation."""
        if not self._recorded:
            return
        for key, (t, recorded, _) in self._recorded.items():
            self._recorded[key] = (t, recorded, self._hash_of(t)(t.flat))
        places: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for _, recorded, found in self._recorded.values():
            places.setdefault(found.device, []).append((recorded, found))
        for pairs in places.values():
            before, now = (torch.cat(hashes) for hashes in zip(*pairs))
            self.differing += (now != before).sum().to(self._device, non_blocking=True)

    def damage(self) -> Damage | None:
        """Return the damage found since the update before the last, with the places of the first damaged kind, or None.

        Waits for the device.
        """
        return damage_of([Change(*found) for found in [*self._before, *self._recorded.values()]])


class Change(NamedTuple):
    """A tensor whose rows had hashes ``recorded``, and ``found`` ones later."""

    tensor: StateTensor
    recorded: torch.Tensor
    found: torch.Tensor


def damage_of(changes: Iterable[Change], **words: str) -> Damage | None:
    """Return what rows that differ amount to, with the places of the first damaged kind; None: none does.

    ``words``: of the :class:`Damage`. Waits for the device.
    """
    rows, kind = 0, ""
    places: list[str] = []
    for change in changes:
        bad = (change.found != change.recorded).nonzero().flatten().tolist()
        rows += len(bad)
        if bad and kind in ("", change.tensor.kind) and len(places) < NAMED:
            kind = change.tensor.kind
            places.append(_place(change.tensor, bad[0], int(change.found[bad[0]]) - int(change.recorded[bad[0]])))
    return Damage(kind, tuple(places), rows, **words) if rows else None  # type: ignore[arg-type]


def _place(t: StateTensor, row: int, difference: int) -> str:
    """The parameter, and of one damaged word also the element and the bit."""
    words = RowHashes.words(t.flat)
    size = words.element_size()
    found = one_word(row_factors(t.flat.device)[: min(ROW, len(words) - row * ROW)], difference, bits=8 * size)
    if found is None:
        first = row * ROW * size // t.flat.element_size()
        last = min((row + 1) * ROW * size // t.flat.element_size(), t.flat.numel())
        names = [e.name for e in t.entries if e.start < last and e.start + e.numel > first]
        return " or ".join(names[:NAMED]) + (" or others" if len(names) > NAMED else "") or "padding"
    word, change = found
    byte = (row * ROW + word) * size
    if abs(change).bit_count() == 1:
        byte += (abs(change).bit_length() - 1) // 8
    element = byte // t.flat.element_size()
    for e in t.entries:
        if e.start <= element < e.start + e.numel:
            return f"{e.name} (element {element - e.start + e.offset}{_bit(byte, change, t.flat)})"
    return f"padding behind {t.entries[-1].name}" if t.entries else "padding"


def _bit(byte: int, change: int, flat: torch.Tensor) -> str:
    """``, bit 30``, where a single bit was flipped. (A difference of 2^k may also be a carry through several bits.)"""
    if abs(change).bit_count() != 1:
        return ""
    return f", bit {8 * (byte % flat.element_size()) + (abs(change).bit_length() - 1) % 8}"
