"""A rank's side of the watch: a thread with one connection that sends a heartbeat a second and does as it is told."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from megatron_port.config.schema import WatchConfig
from megatron_port.errors import PortError
from megatron_port.runtime.discovery import ProcessInfo, is_loopback, resolve_host
from megatron_port.runtime.pulse import END, PHASES, Pulse
from megatron_port.runtime.sockets import is_own_address, own_addresses
from megatron_port.watch import wire
from megatron_port.watch.hub import STACK_SIGNAL
from megatron_port.watch.processes import born, kill
from megatron_port.watch.words import FOREIGN, Stack

BEAT_S = 1.0
HUB_STARTS_S = 30.0
CONNECT_S = 10.0
HOLD_S = 8.0
"""A rank that lost a peer waits so long for the watch's verdict before it speaks for itself."""
HUB_ENDS_S = 5.0


class Store(Protocol):
    """What is used of the rendezvous' store."""

    def set(self, key: str, value: str) -> None:
        """Publish."""

    def get(self, key: str) -> bytes:
        """Wait for a key."""


def python_stacks() -> list[Stack]:
    """Every Python thread but this one, the main thread first. No file is read: a hung file system must not matter."""
    me, main = threading.get_ident(), threading.main_thread().ident
    names = {t.ident: t.name for t in threading.enumerate()}
    found: list[tuple[bool, Stack]] = []
    for ident, frame in sys._current_frames().items():
        if ident == me:
            continue
        frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(frame)]
        found.append((ident != main, (names.get(ident, FOREIGN), frames[::-1])))
    return [stack for _, stack in sorted(found, key=lambda item: item[0])]


class Client:
    """Heartbeats of this process.

    Args:
        address, port, secret: of the hub.
        coords: for messages; stage: pipeline stage.
        note: takes a line when the watch itself fails; the run goes on.
    """

    def __init__(
        self, pulse: Pulse, *, rank: int, host: str, coords: str, stage: int, address: str, port: int, secret: str,
        note: Callable[[str], None],
    ) -> None:
        self.pulse, self.note = pulse, note
        self.spoken = threading.Event()
        """The hub has nothing to say: a rank that lost a peer may speak."""
        self._sending = threading.Lock()
        self._closing = False
        self._sent_steps = -1
        self._handles = False
        self.sock = socket.create_connection((address, port), timeout=CONNECT_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._catch_signals()
        pid = os.getpid()
        self._send(wire.HELLO, secret, rank, host, pid, born(pid), coords, stage)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def _catch_signals(self) -> None:
        """A fatal signal's stack, and one asked for by the hub's signal, go into the connection as plain text."""
        faulthandler.register(STACK_SIGNAL, file=self.sock.fileno(), all_threads=True)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=self.sock.fileno(), all_threads=False)
            self._handles = True

    def _send(self, kind: str, *values: object) -> None:
        with self._sending:
            self.sock.sendall(wire.pack(kind, *values))

    def beat(self) -> None:
        """One heartbeat. Raises OSError."""
        p = self.pulse
        totals = [round(p.totals[phase], 4) for phase in PHASES]
        self._send(
            wire.BEAT, p.counter, p.scope, p.phase, p.operation, p.number, round(time.monotonic() - p.since, 3), p.step,
            p.steps_done, round(p.step_seconds, 4), totals,
        )

    def _run(self) -> None:
        unpacker = wire.Unpacker()
        due = time.monotonic()
        try:
            while not self._closing:
                left = due - time.monotonic()
                if left <= 0:
                    self.beat()
                    due = max(due + BEAT_S, time.monotonic())
                    continue
                if not select.select([self.sock], [], [], left)[0]:
                    continue
                data = self.sock.recv(1 << 16)
                if not data:
                    raise EOFError
                for message in unpacker.feed(data):
                    self._obey(message)
        except (OSError, EOFError, ValueError, wire.WireError) as error:
            if not self._closing:
                self.note(f"the watch has ended ({error or 'its process is gone'}); the run goes on without it")
        finally:
            self.spoken.set()

    def _obey(self, message: list) -> None:
        kind, values = message[0], message[1:]
        if kind == wire.ASK:
            self.beat()
            self._send(wire.STACKS, python_stacks())
        elif kind == wire.SPEAK:
            self.spoken.set()
        elif kind == wire.LEAVE and not self._closing:
            code, mute = values
            kill((pid, start) for pid, start in mute)
            # The main thread may be anywhere, even inside of a collective that never ends.
            os._exit(code)

    def failing(self, error: BaseException, *, victim: bool, told: bool) -> None:
        """Tell the hub of the error that ends this rank. A victim waits for the hub's verdict and mostly ends here."""
        code = error.exit_code if isinstance(error, PortError) else 1
        text = str(error) if isinstance(error, PortError) else f"{type(error).__name__}: {error}; see its traceback"
        with contextlib.suppress(OSError):
            self.beat()
            self._send(wire.FAILING, code, text[:4000], told, victim)
            if victim:
                self.spoken.wait(HOLD_S)

    def close(self, *, failed: bool = False) -> None:
        """Leave. ``failed``: without a goodbye, :meth:`failing` has told."""
        with contextlib.suppress(OSError):
            self.pulse.scope = END
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


def hub_address(info: ProcessInfo) -> str:
    """One address of this host that all ranks can reach: the master's, as the rendezvous uses it."""
    if info.num_nodes == 1:
        return "127.0.0.1"
    with contextlib.suppress(OSError):
        for address in resolve_host(info.master_addr):
            if is_own_address(address) and not is_loopback(address):
                return address
    found = own_addresses()
    return found[0] if found else "127.0.0.1"


def start_hub(config: WatchConfig, info: ProcessInfo, folder: Path) -> tuple[subprocess.Popen[bytes], dict]:
    """Start the hub; (process, {address, port, secret}). Raises OSError, or TimeoutError when it does not answer."""
    receive, answer = os.pipe()
    address, secret = hub_address(info), secrets.token_hex(16)
    setup = {
        "secret": secret, "folder": str(folder.absolute()), "host": info.hostname, "world": info.world_size,
        "address": address, "answer": answer, "config": asdict(config),
    }
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_port.watch.hub"], stdin=subprocess.PIPE, pass_fds=(answer,),
        )
    finally:
        os.close(answer)
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(setup).encode() + b"\n")
        process.stdin.flush()
        if not select.select([receive], [], [], HUB_STARTS_S)[0]:
            raise TimeoutError(f"it did not answer within {HUB_STARTS_S:g} s")
        line = os.read(receive, 32)
        if not line.strip().isdigit():
            raise OSError("it ended at once")
    except OSError:
        process.kill()
        process.wait()
        raise
    finally:
        os.close(receive)
    return process, {"address": address, "port": int(line), "secret": secret}


@contextmanager
def watched(
    config: WatchConfig, info: ProcessInfo, pulse: Pulse, *, coords: str, stage: int, folder: Path,
    store: Store | None, note: Callable[[str], None], victim_of: Callable[[BaseException], PortError | None],
) -> Iterator[None]:
    """Watch this rank while the body runs. The watch's own failures are noted and never end a run.

    Args:
        folder: of the run.
        store: through which rank 0 tells the others where the hub is; None: a single process.
        victim_of: an error → what it says of a lost peer, or None (``runtime.peers``).
    """
    if not config.enabled or (info.world_size == 1 and not config.single_process):
        yield
        return
    hub: subprocess.Popen[bytes] | None = None
    where: dict = {}
    if info.rank == 0:
        try:
            hub, where = start_hub(config, info, folder)
        except OSError as error:
            note(f"the watch could not be started ({error}); the run goes on without it")
        if store is not None:
            store.set("watch", json.dumps(where))
    elif store is not None:
        where = json.loads(store.get("watch"))
    client: Client | None = None
    if where:
        try:
            client = Client(
                pulse, rank=info.rank, host=info.hostname, coords=coords, stage=stage, note=note, **where
            )
        except OSError as error:
            note(f"rank {info.rank} on {info.hostname} cannot reach the watch at {where['address']}:{where['port']} "
                 f"({error}); it is not watched")
    try:
        yield
    except BaseException as error:
        if client is not None:
            lost = victim_of(error)
            told = info.rank == 0 or bool(getattr(error, "speaks", None))
            client.failing(lost or error, victim=lost is not None, told=told)
            client.close(failed=True)
        raise
    else:
        if client is not None:
            client.close()
    finally:
        if hub is not None:
            _end_hub(hub)


def _end_hub(hub: subprocess.Popen[bytes]) -> None:
    """It ends by itself when every rank has left or been told to."""
    assert hub.stdin is not None
    with contextlib.suppress(OSError):
        hub.stdin.close()
    try:
        hub.wait(HUB_ENDS_S)
    except subprocess.TimeoutExpired:  # a rank has not left yet; its end is no longer this run's concern
        hub.kill()
        hub.wait()
