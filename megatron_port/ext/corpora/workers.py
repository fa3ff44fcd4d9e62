"""Pool of forked processes that work on blocks. Results come in the order of the blocks; memory stays bounded."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing.process import BaseProcess

from megatron_port.core.dist.process import die_with_parent
from megatron_port.core.errors import EnvironmentFault
from megatron_port.ext.corpora.records import Encoded
from megatron_port.ext.corpora.sources import Block

Work = Callable[[Block], Encoded]


def ordered(blocks: Iterator[Block], work: Work, workers: int) -> Generator[tuple[Block, Encoded], None, None]:
    """Yield ``(block, its documents)`` in order; ``workers`` 1: here, without another process.

    The blocks that come back have no payload. Raises what ``work`` raises, for the first block in order that fails.

    Raises:
        EnvironmentFault: a worker was ended (out of memory, or a crash inside of a tokenizer).
    """
    if workers <= 1:
        for block in blocks:
            yield block, work(block)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer=_begin, initargs=(work,))
    team: set[BaseProcess] = set()
    waiting: deque[tuple[Block, Future[Encoded]]] = deque()
    try:
        for block in blocks:
            waiting.append((replace(block, payload=b""), pool.submit(_work_on, block)))
            team.update(multiprocessing.active_children())
            if len(waiting) >= 4 * workers:  # a slow block may not let the others run ahead without end
                first, made = waiting.popleft()
                yield first, made.result()
        for first, made in waiting:
            yield first, made.result()
    except BrokenProcessPool:
        pool.shutdown()
        raise _lost(team) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(work: Work) -> None:
    """Prepare a worker: it keeps ``work``, which it got by the fork, and leaves Ctrl-C to its parent."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    multiprocessing.current_process().work = work  # type: ignore[attr-defined]


def _work_on(block: Block) -> Encoded:
    made: Encoded = multiprocessing.current_process().work(block)  # type: ignore[attr-defined]
    return made


def _lost(team: Iterable[BaseProcess]) -> EnvironmentFault:
    """Return the error for a worker that ended by itself; the pool ends the others by SIGTERM."""
    codes = [p.exitcode for p in team if p.exitcode not in (None, 0, -signal.SIGTERM)] or [-signal.SIGTERM]
    code = codes[0] or 0
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return EnvironmentFault(f"a tokenizer process was ended ({how}); if memory is short, use fewer --workers. What was "
                            "done so far is kept where it was saved")
