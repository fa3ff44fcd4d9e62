"""Who commits to a folder, and the order of its commits. Clocks have no say in it.

Each commit gets the number after the highest in its folder. One attempt at a time commits (``run.lease``), so the
numbers say what came after what, whatever the clocks of its nodes said and however often the run went back to an
earlier step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from megatron_port.core.checkpoint.format import Lineage, Parent
from megatron_port.core.dist.rank import Fence

_TEMPORARY = re.compile(r"step-\d{8,18}(?:\.e(\d{1,18}))?(?:\.\d{1,9})?\.tmp")


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
