"""Skips what this machine cannot run, with the reason, and orders the rest for several workers.

Also the two servers that tests fork processes from, one of each for all folders: each imports torch once.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

gc.disable()  # until all is collected: a quarter of the seconds that collecting takes

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "distributed"), str(HERE / "unit")]
sys.path.append(str(HERE.parent / "scripts"))

if TYPE_CHECKING:
    from commands import Commands
    from pool import RankPool


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """``commands.start("train", …)`` forks a ``megatron-port`` command from a process that has imported torch."""
    from commands import Commands

    with Commands(tmp_path_factory.mktemp("commands")) as server:
        yield server


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """``ranks.run(world_size, fn, *args, timeout=240, fresh=False, deepspeed=False)`` → results by rank."""
    from pool import RankPool

    pool = RankPool()
    yield pool
    pool.close()


def _no_gpu() -> str:
    """Why the tests marked gpu cannot run, or nothing."""
    import torch

    return "" if torch.cuda.is_available() else "no GPU that torch can use"


def _no_slurm() -> str:
    """Why the tests marked slurm cannot run, or nothing."""
    lacking = [name for name in ("sbatch", "slurmctld", "slurmd", "munged") if not shutil.which(name)]
    if lacking:
        return f"no {', '.join(lacking)} here (apt-get install slurm-wlm munge iproute2)"
    return "" if os.geteuid() == 0 else "starting a private SLURM needs root"


def _not_slow() -> str:
    """Why the tests marked slow do not run, or nothing."""
    return "" if os.environ.get("SLOW") == "1" else "longer than a minute; SLOW=1 runs it"


FIRST = ("slurm", "distributed", "faults", "e2e", "gpu", "kernels", "unit")
"""Folders by how long one of their groups takes: what is long and cannot be cut must not come last."""
LONG = ("test_watch.py", "test_numerics.py", "test_integrity.py")
"""Files that take a minute: the first of their folder."""
TOGETHER = ("slurm", "kernels")
"""Folders whose files share what is dear to make: a cluster, the emulated libraries."""
WAITING = ("slurm", "faults")
"""Folders whose tests wait most of their time: for jobs, for timeouts. Where there is a worker more than cores, it runs
these and the others run what computes, as long as there is both."""


def pytest_configure() -> None:
    """Let a session on a GPU (scripts/gpu_session.py) that stops the tests at their limit have those that are done."""
    if os.environ.get("PREBUILT_KERNELS") == "1":
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for marker, reason_of in (("gpu", _no_gpu), ("slurm", _no_slurm), ("slow", _not_slow)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = reason_of() if marked else ""
        for item in marked if reason else []:
            item.add_marker(pytest.mark.skip(reason=reason))
    places = {folder: place for place, folder in enumerate(FIRST)}
    items.sort(key=lambda item: (places.get(item.path.parent.name, len(FIRST)), item.path.name not in LONG))


def pytest_collection_finish() -> None:
    """What importing all tests has made stays: the collector, a tenth of the time, need not visit it in each test."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_teardown() -> None:
    """Let a scheduler's signals through again. Training in this process blocks them to its end; what later tests start
    would inherit that, and whoever ends it would wait out its grace before SIGKILL."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR1))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker whole files, or folders of ``TOGETHER``, so that no fixture of theirs is made twice.

    Not by the marks of ``--dist loadgroup``: pytest-xdist 3.8 writes them where pytest 9.2 does not look.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Whole(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.split("::", 1)[0])
            return file.parent.name if file.parent.name in TOGETHER else str(file)

        def _assign_work_unit(self, node: Any) -> None:
            if len(self.nodes) > len(os.sched_getaffinity(0)):
                waits = node is self.nodes[0]
                suits = (scope for scope in self.workqueue if waits == bool(set(WAITING) & set(Path(scope).parts)))
                self.workqueue.move_to_end(next(suits, next(iter(self.workqueue))), last=False)
            super()._assign_work_unit(node)

    return Whole(config, log) if config.getvalue("dist") == "loadscope" else None
