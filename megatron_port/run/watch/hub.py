"""The watch's own process: ``python -m megatron_port.run.watch.hub``, started by rank 0, torch never imported.

A process apart, because a rank 0 that is stopped or stuck must be reported too. It listens on one address, takes
connections that show the run's secret, applies ``rules`` to the heartbeats and, when something is wrong, collects the
stacks, names the culprit, prints the message once, tells the ranks to end, and ends the ranks of its own host that
cannot hear. It ends itself with the last connection, or when rank 0 is gone and nobody has come.

Set up by one line of JSON on standard input (which stays open: its end means that rank 0 is gone); says on the
descriptor that the line names when it serves. The listening socket is rank 0's, and so is the duty to start another hub
when this one dies (``run.watch.hub_process``).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import resource
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from megatron_port.core.config.schema import WatchConfig
from megatron_port.core.dist.process import ignore_in_child
from megatron_port.core.errors import EnvironmentFault, HangError, PortError
from megatron_port.core.io.logging import encodable, ranks_text, redact
from megatron_port.run.launchers import attempt_name
from megatron_port.run.processes import born, kill, out_of_memory_kills
from megatron_port.run.run_files import add_event, add_spread, record_failure
from megatron_port.run.watch import rules as judge
from megatron_port.run.watch import wire
from megatron_port.run.watch.report import NowFile, write_hang
from megatron_port.run.watch.rules import LAGS_S, Alarm, Beat, RankIdentity, Rules, Stragglers
from megatron_port.run.watch.wire import Stack

TICK_S = 0.25
ALIVE_S = 1.0
"""Between two messages by which ranks see that the hub is alive."""
ROSTER_AT_ONCE = 256
"""Ranks announced to rank 0 per tick."""
HELLO_S = 20.0
"""A connection that has not shown the secret within this time is closed."""
MISSING_S = 60.0
"""Ranks that have not connected by then are named once, and are not watched."""
COLLECT_S = 3.0
"""For the stacks."""
REPORTED_S = 20.0
"""For which a hang that the agent was told of is left to it; the hub of its next start is another."""
LEAVE_S = 3.0
"""For the ranks to end; then those of this host are killed."""
SPARE_FILES = 256
"""Descriptors beyond one per rank."""


class Link:
    """Connection to one rank."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.sock, self.since = sock, now
        self.unpacker = wire.Unpacker(wire.LARGEST_HELLO)
        self.rank: int | None = None

    def send(self, message: bytes) -> None:
        """Send a few dozen bytes into a socket buffer; a rank that takes nothing is not waited for."""
        with contextlib.suppress(OSError):
            self.sock.send(message)


class Hub:
    """Hub of the watch. ``out``, ``err``: where lines are written."""

    def __init__(self, setup: Mapping[str, Any], listener: socket.socket, *, out: Any = None, err: Any = None) -> None:
        self.secret = str(setup["secret"])
        self.folder = Path(setup["folder"])
        self.host = str(setup["host"])
        self.world = int(setup["world"])
        self.replaces = bool(setup.get("replaces"))
        """An agent starts lost ranks again (``run.agent``): it is told of those that hang, and nobody is ended here."""
        self.out, self.err = out or sys.stdout, err or sys.stderr
        config = WatchConfig(**setup["config"])
        now = time.monotonic()
        self.rules = Rules(config, self.world, now)
        self.replace_percent = config.replace_percent
        for place in setup.get("roster", ()):  # an earlier hub knew them: one that does not come back is missed
            self.rules.hello(RankIdentity(*place), now, met=False)
        self.met: set[int] = set()
        """Ranks that have been connected to this hub."""
        self.untold: deque[RankIdentity] = deque()
        """Ranks not yet announced to rank 0."""
        self.alive_at = now
        self.reported_until = 0.0
        """The agent has been told of a hang, and is at work until then."""
        self.stragglers = Stragglers(config, now)
        self.now_file = NowFile(self.folder)
        self.selector = selectors.DefaultSelector()
        self.listener = listener
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)
        self.links: dict[int, Link] = {}
        self.strangers: set[Link] = set()
        self.stacks: dict[int, list[Stack]] = {}
        self.words: dict[int, str] = {}
        self.alarm: Alarm | None = None
        self.collect_until = self.leave_until = self.gone_at = 0.0
        self.rank_zero_here = True
        self.warned = False
        self.started = now
        self.memory_kills = out_of_memory_kills()

    def serve(self, parent: int | None = None) -> None:
        """Serve until the last rank has left. ``parent``: descriptor whose end means that rank 0 is gone."""
        if parent is not None:
            self.selector.register(parent, selectors.EVENT_READ)
        next_tick = 0.0
        while not self._is_over():
            for key, _ in self.selector.select(max(0.0, next_tick - time.monotonic())):
                if key.fileobj is self.listener:
                    self._accept()
                elif key.data is not None:
                    self._read(key.data)
                elif not os.read(key.fd, 4096):
                    self.selector.unregister(key.fileobj)
                    self.rank_zero_here = False
                    self.gone_at = time.monotonic()
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_S
                self._tick(now)

    def _is_over(self) -> bool:
        if self.links:
            return False
        known = [self.rules.ranks[r] for r in self.met]
        if known and (self.leave_until or all(s.left or s.fault for s in known)):
            return True
        # Connections have all ended and somebody was lost: the verdict comes first. Nobody ever came, or one that lost
        # its connection will not come back: wait a little.
        alone = not self.rank_zero_here and time.monotonic() - self.gone_at > LEAVE_S
        return alone and (not known or self.replaces)

    # Connections.

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                link = Link(sock, time.monotonic())
                self.strangers.add(link)
                self.selector.register(sock, selectors.EVENT_READ, link)

    def _drop(self, link: Link) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(link.sock)
        link.sock.close()
        self.strangers.discard(link)
        if link.rank is not None and self.links.get(link.rank) is link:
            if link.unpacker.words:
                self.words[link.rank] = link.unpacker.words.decode(errors="replace")
            self.rules.closed(link.rank, time.monotonic())
            del self.links[link.rank]

    def _read(self, link: Link) -> None:
        try:
            data = link.sock.recv(1 << 16)
            if not data:
                raise EOFError
            for message in link.unpacker.feed(data):
                self._take(link, message)
        except BlockingIOError:
            return
        except (OSError, EOFError, wire.WireError, LookupError, TypeError, ValueError):
            self._drop(link)  # gone, or not one of us

    def _take(self, link: Link, message: list[Any]) -> None:
        kind, values, now = message[0], message[1:], time.monotonic()
        if link.rank is None:
            self._greet(link, kind, values, now)
        elif kind == wire.BEAT:
            self.rules.beat(link.rank, Beat(*[*values[:9], tuple(values[9])]), now)
        elif kind == wire.STACKS:
            self.stacks[link.rank] = values[0]
        elif kind == wire.FAILING:
            code, text, told, victim = values
            self.rules.failing(link.rank, code=int(code), text=str(text), told=told, victim=victim, now=now)
        elif kind == wire.BYE:
            self.rules.goodbye(link.rank)

    def _greet(self, link: Link, kind: str, values: list[Any], now: float) -> None:
        """Take the first message, which must show the secret. Raises WireError."""
        if kind != wire.HELLO or not hmac.compare_digest(str(values[0]).encode(), self.secret.encode()):
            raise wire.WireError("no secret")
        place = RankIdentity(*values[1:])
        if not 0 <= place.rank < self.world:
            raise wire.WireError("no such rank")
        before = self.links.get(place.rank)
        if before is not None:
            if self.rules.ranks[place.rank].place != place:
                raise wire.WireError("another process is this rank already")
            del self.links[place.rank]  # it has connected anew
            self._drop(before)
        link.rank = place.rank
        link.unpacker.largest = wire.LARGEST
        self.strangers.discard(link)
        self.links[place.rank] = link
        self.met.add(place.rank)
        self.rules.hello(place, now)
        self.untold.extend([s.place for s in self.rules.ranks.values()] if place.rank == 0 else [place])

    # Judgement.

    def _tick(self, now: float) -> None:
        for link in [x for x in self.strangers if now - x.since > HELLO_S]:
            self._drop(link)
        self._tell(now)
        self.now_file.write(self.rules.ranks, self.world, now)
        if self.leave_until:
            if now >= self.leave_until or not self._hearing(now):
                self._finish()
            return
        if self.collect_until:
            if now >= self.collect_until or self._all_stacks(now):
                self._hang(now)
            return
        alarm = self.rules.tick(now)
        if alarm is not None and (alarm.kind != "hang" or now >= self.reported_until):
            self._raise(alarm, now)
            return
        for finding in self.stragglers.look(self.rules.ranks.values(), now):
            self._say(finding.line())
            add_event(self.folder, finding.record())
        slowest = max(self.stragglers.slow.items(), key=lambda item: item[1], default=(0, 0.0))
        if self.replaces and self.replace_percent and slowest[1] > 1 + self.replace_percent / 100:
            self.stragglers.slow.clear()  # until the next window
            self._tell_agent(now, wire.SLOW, slowest[0], round(slowest[1], 3))
        spread = self.stragglers.spread()
        if spread is not None:
            add_spread(self.folder, spread)
        if not self.warned and now - self.started > MISSING_S:
            self.warned = True
            missing = [r for r in range(self.world) if r not in self.rules.ranks]
            if missing:
                self._say(f"watch: {ranks_text(missing)} did not connect within {MISSING_S:g} s; not watched")

    def _tell(self, now: float) -> None:
        """Send a sign of life to every rank, and to rank 0 the identities of the others."""
        if now - self.alive_at >= ALIVE_S:
            self.alive_at = now
            self._order(wire.ALIVE)
        if 0 in self.links:
            for _ in range(min(ROSTER_AT_ONCE, len(self.untold))):
                self.links[0].send(wire.pack(wire.ROSTER, list(astuple(self.untold.popleft()))))

    def _raise(self, alarm: Alarm, now: float) -> None:
        self.alarm = alarm
        if alarm.kind == "hang":
            self.collect_until = now + COLLECT_S
            self._order(wire.ASK)
            kill([(s.place.pid, s.place.born) for r, s in self.rules.ranks.items()
                  if s.here and s.place.host == self.host and now - s.heard_at >= LAGS_S], wire.STACK_SIGNAL)
        elif alarm.kind == "lost":
            place = self.rules.ranks[alarm.rank].place
            if self.replaces and place.host == self.host and born(place.pid) == place.born != 0:
                self.rules.explained()  # only its connection has ended: it connects anew
                self.alarm = None
                return
            hint = ""
            if out_of_memory_kills() > self.memory_kills:
                hint = f"the kernel of {self.host} has killed a process for lack of memory meanwhile"
            words = self.words.get(alarm.rank, "")
            self._act(judge.lost(self.rules, alarm.rank, words=words, hint=hint), EnvironmentFault, now)
        elif alarm.kind == "failed":
            self._act(judge.failed(self.rules, alarm.rank), EnvironmentFault, now)
        else:
            self._order(wire.SPEAK)
            self.rules.explained()
            self.alarm = None

    def _all_stacks(self, now: float) -> bool:
        """Return whether every rank that can answer has; the others had half a second to write in a signal handler."""
        able = [r for r, s in self.rules.ranks.items() if s.here and now - s.heard_at < LAGS_S]
        mute = any(s.here and now - s.heard_at >= LAGS_S for s in self.rules.ranks.values())
        waited = now - (self.collect_until - COLLECT_S)
        return all(r in self.stacks for r in able) and (not mute or waited >= 0.5)

    def _hang(self, now: float) -> None:
        assert self.alarm is not None
        if not any(s.here and s.fault is None for s in self.rules.ranks.values()):
            self.alarm, self.collect_until = None, 0.0  # they have all left while their stacks were collected
            return
        verdict = judge.hang(self.rules, self.alarm, self.stacks, now)
        raw = {r: link.unpacker.words.decode(errors="replace") for r, link in self.links.items()
               if link.unpacker.words and r not in self.stacks}
        try:
            path = write_hang(self.folder, verdict, self.rules.ranks, self.stacks, now=now, raw=raw)
            where = f"stacks of {len(self.stacks) + len(raw)} of {self.world} ranks: {path}"
        except OSError as error:
            where = f"the stacks could not be written to {self.folder}: {error}"
        verdict = judge.Diagnosis(verdict.code, verdict.ranks, verdict.headline, (*verdict.details, where))
        self._act(verdict, HangError, now)

    def _act(self, verdict: judge.Diagnosis, kind: type[PortError], now: float) -> None:
        """Print the verdict once, leave it for the job script, and tell the ranks to end."""
        if not verdict.told:
            text = "\n  ".join((f"error: {verdict.headline}", *verdict.details))
            with contextlib.suppress(OSError):
                self.err.write(text + "\n")
                self.err.flush()
            named = self.rules.ranks[verdict.ranks[0]].place
            own_word = self.alarm is not None and self.alarm.kind == "failed"
            if self.alarm is not None and not own_word and not self.replaces:
                record_failure(
                    self.folder, attempt_name(), named.rank, kind(verdict.headline), host=named.host,
                    lost_peer=self.alarm.kind == "lost",
                )
        if self.replaces:
            self._report_hung(verdict, now)
            self._forget(verdict)
            return
        self.leave_until = now + LEAVE_S
        failed = {r for r, s in self.rules.ranks.items() if s.fault is not None and not s.fault.victim}
        mute: dict[str, list[tuple[int, int]]] = {}
        for s in self.rules.ranks.values():
            if s.here and now - s.heard_at >= LAGS_S and s.place.host != self.host:
                mute.setdefault(s.place.host, []).append((s.place.pid, s.place.born))
        for rank, link in self.links.items():
            if rank not in failed:
                host = self.rules.ranks[rank].place.host
                link.send(wire.pack(wire.LEAVE, verdict.code, mute.get(host, [])))

    def _report_hung(self, verdict: judge.Diagnosis, now: float) -> None:
        """Have the agent told of the ranks that a hang's verdict names, by a rank that can hear; it replaces them.

        The others hang too until they have left their step: for a while they are not named.
        """
        if self.alarm is not None and self.alarm.kind == "hang":
            self._tell_agent(now, wire.HUNG, list(verdict.ranks))
            self.reported_until = now + REPORTED_S

    def _tell_agent(self, now: float, kind: str, *values: Any) -> None:
        """Have a rank that can hear pass something on to the agent."""
        able = [link for rank, link in sorted(self.links.items()) if now - self.rules.ranks[rank].heard_at < LAGS_S]
        if able:
            able[0].send(wire.pack(kind, *values))

    def _forget(self, verdict: judge.Diagnosis) -> None:
        """Watch on: the others leave by themselves, and a rank may only have lost its connection to this process."""
        for rank in verdict.ranks:
            self.rules.ranks[rank].left = True  # it has been named
        self.alarm, self.collect_until = None, 0.0
        self.stacks.clear()
        self.rules.explained()

    def _order(self, kind: str) -> None:
        for link in self.links.values():
            link.send(wire.pack(kind))

    def _hearing(self, now: float) -> bool:
        """Return whether a rank that hears us has not ended yet."""
        return any(now - self.rules.ranks[r].heard_at < LAGS_S for r in self.links)

    def _finish(self) -> None:
        """End the ranks of this host that cannot hear: after the others, so that a launcher sees their code first."""
        left = [self.rules.ranks[r] for r in self.links]
        if left:
            time.sleep(0.2)
        here = [s for s in left if s.place.host == self.host and (s.fault is None or s.fault.victim)]
        kill([(s.place.pid, s.place.born) for s in here])
        for link in list(self.links.values()):
            self._drop(link)

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self.out.write(redact(line) + "\n")
            self.out.flush()


def main() -> int:
    """Serve one run."""
    ignore_in_child()
    encodable(sys.stdout)
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as raw:  # nothing is read ahead
        setup = json.loads(raw.readline())
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = setup["world"] + SPARE_FILES  # a login shell's limit is often 1024
    if files != resource.RLIM_INFINITY and files < wanted:
        files = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    with socket.socket(fileno=setup["listener"]) as listener:
        hub = Hub(setup, listener)
        try:
            os.write(setup["answer"], b"ready\n")
        except BrokenPipeError:
            return 0  # rank 0 was killed while it waited for this process
        os.close(setup["answer"])
        hub.serve(sys.stdin.fileno())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
