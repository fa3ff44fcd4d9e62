"""Pool of forked processes that work on blocks. Results come in the order of the blocks; memory stays bounded.

Only bytes travel: a frame of JSON and the payload, over a pipe for each worker. A worker has one block at a time, and
the parent takes a result before it sends the next, so neither can wait for the other.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from megatron_port.data.records import Encoded
from megatron_port.data.sources import Block
from megatron_port.errors import DataError, EnvironmentFault

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
    team = [_Worker(work) for _ in range(workers)]
    try:
        yield from _run(blocks, team)
    finally:
        for member in team:
            member.stop()


class _Worker:
    def __init__(self, work: Work) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, child = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(child, self.connection, work), daemon=True)
        self.process.start()
        child.close()
        self.number: int | None = None

    def send(self, number: int, block: Block) -> None:
        head = {"kind": block.kind, "spans": block.spans, "sizes": block.sizes, "dropped": block.dropped}
        try:
            self.connection.send_bytes(json.dumps(head).encode())
            self.connection.send_bytes(block.payload)
        except (BrokenPipeError, ConnectionResetError):
            raise self.lost() from None
        self.number = number

    def receive(self) -> Encoded | DataError:
        try:
            head = json.loads(self.connection.recv_bytes())
            if "error" in head:
                return DataError(head["error"])
            if "crash" in head:
                raise RuntimeError(head["crash"])
            lengths = self.connection.recv_bytes()
            data = self.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            raise self.lost() from None
        import numpy as np

        self.number = None
        return Encoded(np.frombuffer(lengths, dtype="<i4"), data, head["left_out"], head["repaired"], head["notes"])

    def lost(self) -> EnvironmentFault:
        self.process.join(5)
        code = self.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        return EnvironmentFault(f"a tokenizer process was ended ({how}); if memory is short, use fewer --workers. What "
                                "was done so far is kept where it was saved")

    def stop(self) -> None:
        self.connection.close()
        if self.process.is_alive():
            self.process.terminate()
        self.process.join()


def _run(blocks: Iterator[Block], team: list[_Worker]) -> Iterator[tuple[Block, Encoded]]:
    waiting: dict[int, Block] = {}
    done: dict[int, Encoded | DataError] = {}
    sent = given = 0
    more = True
    while more or waiting:
        for member in team:
            # A slow block may not let the others run ahead without end.
            if not more or member.number is not None or sent - given >= 4 * len(team):
                continue
            block = next(blocks, None)
            if block is None:
                more = False
                break
            member.send(sent, block)
            block.payload = b""
            waiting[sent] = block
            sent += 1
        busy = {member.connection: member for member in team if member.number is not None}
        for ready in wait(list(busy)) if busy else ():
            member = busy[ready]  # type: ignore[index]
            number = member.number
            assert number is not None
            done[number] = member.receive()
            member.number = None
        while given in done:
            result = done.pop(given)
            if isinstance(result, DataError):
                raise result
            yield waiting.pop(given), result
            given += 1


def _serve(connection: Connection, parents: Connection, work: Work) -> None:
    """A worker's life: until the parent closes the pipe."""
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while True:
        try:
            head = json.loads(connection.recv_bytes())
            payload = connection.recv_bytes()
        except (EOFError, OSError):
            return
        block = Block(head["kind"], payload, [tuple(span) for span in head["spans"]], head["sizes"], head["dropped"])
        try:
            made = work(block)
        except DataError as error:
            connection.send_bytes(json.dumps({"error": str(error)}).encode())
            continue
        except Exception as error:
            connection.send_bytes(json.dumps({"crash": f"{type(error).__name__}: {error}"}).encode())
            continue
        about = {"left_out": made.left_out, "repaired": made.repaired, "notes": made.notes}
        connection.send_bytes(json.dumps(about).encode())
        connection.send_bytes(made.lengths.tobytes())
        connection.send_bytes(made.data)
