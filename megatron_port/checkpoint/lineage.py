"""Which run a checkpoint is of, and the order of a folder's commits. Clocks have no say in it.

Each commit gets the number after the highest in its folder. One attempt at a time commits (``runtime.lease``), so the
numbers say what came after what, whatever the clocks of its nodes said and however often the run went back to an
earlier step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_port.runtime.lease import Fence

_TEMPORARY = re.compile(r"step-\d{8,18}(?:\.e(\d{1,18}))?\.tmp")
_TEXT, _COUNT = 256, 1 << 63


@dataclass(frozen=True, kw_only=True)
class Parent:
    """Checkpoint that a checkpoint's training had begun at, or last saved."""

    run: str = ""
    commit: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """Origin of a checkpoint. All is empty in those of versions that did not record it."""

    run: str = ""
    """Id of the run."""
    commit: int = 0
    """Its place in the order of the folder's commits, from 1; 0: unknown."""
    epoch: int = 0
    """Epoch of the attempt's lease; of two commits with the same number the later epoch is the newer."""
    attempt: str = ""
    parent: Parent | None = None

    def body(self) -> dict[str, Any]:
        """Return the lineage as the manifest has it."""
        out: dict[str, Any] = {
            "run": self.run, "commit": self.commit, "epoch": self.epoch, "attempt": self.attempt,
        }
        return out | ({"parent": dict(vars(self.parent))} if self.parent is not None else {})


def parse_lineage(value: Any) -> Lineage:
    """Parse the ``lineage`` of a manifest; absent in older ones. Raises ValueError."""
    if value is None:
        return Lineage()
    texts, counts = ("run", "attempt"), ("commit", "epoch")
    parent = value.get("parent") if isinstance(value, Mapping) else None
    return Lineage(
        **_typed(value, texts, counts),
        parent=None if parent is None else Parent(**_typed(parent, ("run",), ("commit", "step"))),
    )


def _typed(value: Any, texts: tuple[str, ...], counts: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"lineage is {value!r:.60}; expected an object")
    for name in texts:
        if not isinstance(value.get(name, ""), str) or len(value.get(name, "")) > _TEXT:
            raise ValueError(f"lineage.{name} is {value.get(name)!r:.60}; expected a text")
    for name in counts:
        if type(value.get(name, 0)) is not int or not 0 <= value.get(name, 0) < _COUNT:
            raise ValueError(f"lineage.{name} is {value.get(name)!r:.60}; expected an integer from 0 to 2^63 - 1")
    return {name: value[name] for name in (*texts, *counts) if name in value}


def temporary_name(name: str, epoch: int) -> str:
    """Return ``step-00000120.e7.tmp``, an unfinished save of attempt 7; ``step-00000120.tmp`` without a lease."""
    return f"{name}.e{epoch}.tmp" if epoch else f"{name}.tmp"


def epoch_of_temporary(name: str) -> int | None:
    """Return the epoch of a temporary name (0: it was made without a lease); None: the name is no temporary's."""
    found = _TEMPORARY.fullmatch(name)
    return int(found.group(1) or 0) if found else None


@dataclass
class Committer:
    """Committer of an attempt: its fence, and the last commit that it made or began at.

    The default is a process alone with the folder, without a lease and without a run.
    """

    fence: Fence = field(default_factory=Fence)
    parent: Parent | None = None
    _last: int = 0

    def lineage(self, directory_commits: int) -> Lineage:
        """Return the next commit's lineage. ``directory_commits``: the folder's highest number, if looked up."""
        return Lineage(
            run=self.fence.run, commit=max(self._last, directory_commits) + 1, epoch=self.fence.epoch,
            attempt=self.fence.attempt, parent=self.parent,
        )

    @property
    def counting(self) -> bool:
        """Whether it has committed: nobody else has since, so the folder need not be searched again."""
        return self._last > 0 and self.fence.epoch > 0

    def committed(self, lineage: Lineage, step: int) -> None:
        """Take note of a commit that was made."""
        self._last = lineage.commit
        self.parent = Parent(run=lineage.run, commit=lineage.commit, step=step)

    def resumed(self, lineage: Lineage, step: int) -> None:
        """Take note of the checkpoint that was loaded; ``_last`` stays: the folder may hold later ones."""
        self.parent = Parent(run=lineage.run, commit=lineage.commit, step=step)

    def owns(self, lineage: Lineage) -> bool:
        """Return whether the checkpoint is this run's, or of no known run: retention may remove it."""
        return not self.fence.run or lineage.run in ("", self.fence.run)


def order(lineage: Lineage, step: int) -> tuple[int, int, int]:
    """Return a sort key: what was committed later is larger. Those without a number come before all others, by step."""
    return lineage.commit, lineage.epoch, step

