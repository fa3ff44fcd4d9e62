"""Which run a checkpoint is of, and the order of a folder's commits. Clocks have no say in it.

Each commit gets the number after the highest in its folder. One attempt at a time commits (``run.lease``), so the
numbers say what came after what, whatever the clocks of its nodes said and however often the run went back to an
earlier step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_port.core.dist.rank import Fence

_TEMPORARY = re.compile(r"step-\d{8,18}(?:\.e(\d{1,18}))?(?:\.\d{1,9})?\.tmp")


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


def parse_lineage(body: Mapping[str, Any]) -> Lineage:
    """Return the ``lineage`` of a manifest whose fields were checked (``schema``); older ones have none of them."""
    def known(cls: type[Lineage] | type[Parent], values: Mapping[str, Any]) -> dict[str, Any]:
        return {f.name: values[f.name] for f in fields(cls) if f.name in values}

    found = known(Lineage, body)
    if "parent" in found:
        found["parent"] = Parent(**known(Parent, found["parent"]))
    return Lineage(**found)


def temporary_name(name: str, epoch: int, number: int = 0) -> str:
    """Return ``step-00000120.e7.tmp``, an unfinished save of attempt 7; ``step-00000120.tmp`` without a lease.
    ``number`` makes others of it (``step-00000120.e7.1.tmp``), for what has to go."""
    return f"{name}{f'.e{epoch}' if epoch else ''}{f'.{number}' if number else ''}.tmp"


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
    told: set[str] = field(default_factory=set)
    """Paths that could not be removed, and were named in the log."""
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

