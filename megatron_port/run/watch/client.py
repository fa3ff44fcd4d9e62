"""A rank's side of the watch: a thread with one connection that sends a heartbeat per second and does as it is told.

The hub sends a word a second too. Where it ends or falls silent, rank 0 starts another (``run.watch.hub_process``), and
every rank connects anew.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_port.core.config.schema import RunConfig, WatchConfig
from megatron_port.core.dist.process import END, PHASES, ProgressTracker
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import PortError
from megatron_port.core.io.logging import Logger
from megatron_port.core.train.folders import run_folder
from megatron_port.run.build import topology_of
from megatron_port.run.peer_failure import explain_peer_failure
from megatron_port.run.processes import born, kill
from megatron_port.run.watch import wire
from megatron_port.run.watch.wire import FOREIGN, HUB_STARTS_S, PAUSE_S, STACK_SIGNAL, Stack, Store, look_up, publish

if TYPE_CHECKING:
    from megatron_port.run.watch.hub_process import HubProcess


BEAT_S = 1.0
CONNECT_S = 10.0
SILENCE_S = {True: 5.0, False: 8.0}
"""A hub that says nothing for so long (on rank 0; elsewhere) is dead or stopped. Rank 0 is first: it starts another."""
MOST_TRIES = 20
"""Connections to a hub that never says a word, before a rank gives up. Rank 0's host is gone then."""
HOLD_S = 8.0
"""A rank that lost a peer waits so long for the watch's verdict before it reports for itself."""


def python_stacks() -> list[Stack]:
    """Return the stacks of all Python threads but this one, main thread first. Reads no file: disks may hang."""
    me, main = threading.get_ident(), threading.main_thread().ident
    names = {t.ident: t.name for t in threading.enumerate()}
    found: list[tuple[bool, Stack]] = []
    for ident, frame in sys._current_frames().items():
        if ident == me:
            continue
        frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(frame)]
        found.append((ident != main, (names.get(ident, FOREIGN), frames[::-1])))
    return [stack for _, stack in sorted(found, key=lambda item: item[0])]


class AgentReports(Protocol):
    """Reports of the watch to an agent that replaces lost ranks (``run.agent_link.AgentLink``)."""

    def hung(self, ranks: Sequence[int]) -> None:
        """Tell that ranks hang."""

    def slow(self, rank: int, ratio: float) -> None:
        """Tell that a rank's own work takes ``ratio`` times as long as its peers'."""


class Client:
    """Sender of this process's heartbeats.

    Args:
        address, port, secret: of the hub.
        coords: for messages; stage: pipeline stage.
        note: takes a line when the watch itself fails; the run continues.
        hub: the hub's process, on the rank that started it and will start it again.
        agent: replaces lost ranks, and is told which ones hang. A rank that lost a peer then does not wait to be told
            to end. None: nobody replaces them.
    """

    def __init__(
        self, progress: ProgressTracker, *, rank: int, host: str, coords: str, stage: int, address: str, port: int,
        secret: str, note: Callable[[str], None], hub: HubProcess | None = None,
        agent: AgentReports | None = None,
    ) -> None:
        self.progress, self.note, self.hub, self._agent = progress, note, hub, agent
        self.spoken = threading.Event()
        """The hub has nothing to say: a rank that lost a peer may speak."""
        self._sending = threading.Lock()
        self._closing = self._failing = False
        self._handles = False
        pid = os.getpid()
        self._at, self._hello = (address, port), (secret, rank, host, pid, born(pid), coords, stage)
        self._patience = SILENCE_S[hub is not None]
        self._heard: float | None = None
        """When the present hub last said a word."""
        self._roster: dict[int, list[Any]] = {}
        """Identity of each rank, as the hub tells the rank that would start the next one."""
        self.sock = self._connection()
        self._catch_signals()
        self._send(wire.HELLO, *self._hello)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def _catch_signals(self) -> None:
        """Send the stack of a fatal signal, and of the signal by which the hub asks for it, as plain text."""
        faulthandler.register(STACK_SIGNAL, file=self.sock.fileno(), all_threads=True)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=self.sock.fileno(), all_threads=False)
            self._handles = True

    def _send(self, kind: str, *values: object) -> None:
        with self._sending:
            self.sock.sendall(wire.pack(kind, *values))

    def beat(self) -> None:
        """Send one heartbeat. Raises OSError."""
        p = self.progress
        totals = [round(p.totals[phase], 4) for phase in PHASES]
        self._send(
            wire.BEAT, p.counter, p.scope, p.phase, p.operation, p.number, round(time.monotonic() - p.since, 3), p.step,
            p.steps_done, round(p.step_seconds, 4), totals,
        )

    def _connection(self) -> socket.socket:
        sock = socket.create_connection(self._at, timeout=CONNECT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _run(self) -> None:
        """Serve one connection after another, until the run ends or no hub can be had."""
        tries, patience = 0, HUB_STARTS_S
        try:
            while not self._closing:
                try:
                    self._serve(patience)
                except (OSError, EOFError, ValueError, wire.WireError) as error:
                    if self._closing or self._failing:
                        return
                    tries = tries + 1 if self._heard is None else 0
                    self.spoken.set()  # no verdict will come: a rank that lost a peer may report it
                    if not self._reconnect(str(error), last=tries >= MOST_TRIES):
                        return
                    self.spoken.clear()
                    patience = HUB_STARTS_S
        finally:
            self.spoken.set()

    def _serve(self, first: float) -> None:
        """Send heartbeats and do what the hub asks. Raises OSError, EOFError or WireError when it is gone or silent.

        ``first``: seconds until its first word; a new hub may still have to start.
        """
        unpacker, now = wire.Unpacker(), time.monotonic()
        due, allowed, looked = now, now + first, now
        self._heard = None
        while not self._closing:
            now = time.monotonic()
            if now - looked > PAUSE_S:
                allowed += now - looked  # this process was stopped, and the hub perhaps with it
            looked = now
            if now >= allowed:
                raise TimeoutError("no word from it")
            if now >= due:
                self.beat()
                due = max(due + BEAT_S, time.monotonic())
                continue
            if not select.select([self.sock], [], [], due - now)[0]:
                continue
            data = self.sock.recv(1 << 16)
            if not data:
                raise EOFError("its process is gone")
            self._heard = time.monotonic()
            allowed = self._heard + self._patience
            for message in unpacker.feed(data):
                self._obey(message)

    def _reconnect(self, why: str, *, last: bool) -> bool:
        """Connect to a hub again; the rank that started it starts another first. Return whether there is one."""
        with contextlib.suppress(OSError):  # should it live and only be slow, this rank is not lost
            self.sock.settimeout(0.0)
            self._send(wire.BYE)
        try:
            if self.hub is not None:
                became = self.hub.restart(list(self._roster.values()))
                self.note(f"the watch was started again: {became}")
            elif last:
                raise OSError(why)
            else:
                time.sleep(BEAT_S)
            new = self._connection()
            with self._sending:
                # Under the old number, which the signal handlers write to.
                os.dup2(new.fileno(), self.sock.fileno(), inheritable=False)
                new.close()
                self.sock.settimeout(CONNECT_S)
            self._send(wire.HELLO, *self._hello)
        except OSError as error:
            if not self._closing:
                self.note(f"the watch has ended ({error}); the run continues without it")
            return False
        return True

    def _obey(self, message: list[Any]) -> None:
        kind, values = message[0], message[1:]
        if kind == wire.ASK:
            self.beat()
            self._send(wire.STACKS, python_stacks())
        elif kind == wire.SPEAK:
            self.spoken.set()
        elif kind == wire.HUNG and self._agent is not None:
            self._agent.hung([int(rank) for rank in values[0]])
        elif kind == wire.SLOW and self._agent is not None:
            self._agent.slow(int(values[0]), float(values[1]))
        elif kind == wire.ROSTER:
            self._roster[int(values[0][0])] = values[0]
        elif kind == wire.LEAVE and not self._closing:
            code, mute = values
            kill((pid, start) for pid, start in mute)
            # The main thread may be anywhere, even inside of a collective that never ends.
            os._exit(code)

    def failing(self, error: BaseException, *, victim: bool, told: bool) -> None:
        """Tell the hub the error that ends this rank. A victim waits for the hub's verdict and mostly ends here."""
        self._failing = True
        code = error.exit_code if isinstance(error, PortError) else 1
        text = str(error) if isinstance(error, PortError) else f"{type(error).__name__}: {error}; see its traceback"
        with contextlib.suppress(OSError):
            self.beat()
            self._send(wire.FAILING, code, text[:4000], told, victim)
            if victim and self._agent is None:
                self.spoken.wait(HOLD_S)

    def close(self, *, failed: bool = False) -> None:
        """Leave the watch. ``failed``: without a goodbye, :meth:`failing` has told."""
        with contextlib.suppress(OSError):
            self.progress.scope = END
            if not failed:
                self._send(wire.BYE)
        self._closing = True
        faulthandler.unregister(STACK_SIGNAL)
        if self._handles:
            faulthandler.disable()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(2.0)
        self.sock.close()


@contextmanager
def watched(
    config: WatchConfig, info: ProcessInfo, progress: ProgressTracker, *, coords: str, stage: int, folder: Path,
    store: Store | None, note: Callable[[str], None], victim_of: Callable[[BaseException], PortError | None],
    agent: AgentReports | None = None,
) -> Iterator[None]:
    """Watch this rank while the body runs. The watch's own failures are noted and never end a run.

    Args:
        folder: of the run.
        store: through which rank 0 tells the others where the hub is; None: a single process.
        victim_of: an error → what it says of a lost peer, or None (``run.peer_failure``).
        agent: replaces lost ranks (``run.agent``). The watch ends none then.
    """
    if not config.enabled or (info.world_size == 1 and not config.single_process):
        yield
        return
    hub: HubProcess | None = None
    where: dict[str, Any] = {}
    if info.rank == 0:
        from megatron_port.run.watch.hub_process import HubProcess  # the other ranks start none

        try:
            hub = HubProcess(config, info, folder, replaces=agent is not None)
            hub.start()
            where = hub.where
        except OSError as error:
            note(f"the watch could not be started ({error}); the run continues without it")
        if store is not None:
            try:
                publish(store, where, info, folder)
            except OSError as error:
                note(f"the ranks cannot be told of the watch ({error}); only rank 0 is watched")
    elif store is not None:
        try:
            where = look_up(store, info, folder)
        except OSError as error:
            note(f"rank {info.rank} on {info.hostname} does not know the watch ({error}); it is not watched")
    client: Client | None = None
    failed = False
    if where:
        try:
            client = Client(
                progress, rank=info.rank, host=info.hostname, coords=coords, stage=stage, note=note, hub=hub,
                agent=agent, **where
            )
        except OSError as error:
            note(f"rank {info.rank} on {info.hostname} cannot reach the watch at {where['address']}:{where['port']} "
                 f"({error}); it is not watched")
    try:
        yield
    except BaseException as error:
        failed = True
        if client is not None:
            lost = victim_of(error)
            told = info.rank == 0 or bool(getattr(error, "is_reporter", None))
            client.failing(lost or error, victim=lost is not None, told=told)
            client.close(failed=True)
        raise
    else:
        if client is not None:
            client.close()
    finally:
        if hub is not None:
            hub.end(leave=failed and agent is not None)


# The watch of a run, put together from what is known once the ranks have met.

def watch_ranks(
    config: RunConfig, info: ProcessInfo, progress: ProgressTracker, store: Store, *,
    agent: AgentReports | None = None,
) -> AbstractContextManager[None]:
    """Send heartbeats of this rank while the body runs, as ``[watch]`` configures; see ``run.watch.client.watched``.

    An ``around`` of ``run.session.open_session``: no group exists yet, so a rank that hangs while they are made is
    seen.
    """
    topology, logger = topology_of(config), Logger(info.rank, info.world_size, info.hostname)
    fits = topology.world_size == info.world_size  # else the session refuses at once
    place = topology.coordinates(info.rank if fits else 0)

    def note(line: str) -> None:
        if info.local_rank == 0:  # one word a node
            logger.log_any(line)

    return watched(
        config.watch, info, progress, coords=str(place), stage=place.pp, folder=run_folder(config), store=store,
        note=note, victim_of=lambda error: explain_peer_failure(error, info), agent=agent,
    )
