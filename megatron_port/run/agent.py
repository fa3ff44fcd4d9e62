"""The agent of a run: it has its ranks started, and when one is lost starts that one again beside those that live.

A rank that is killed leaves the others with errors of the communication library. Each of them leaves its step, tells
the agent, and waits (``run.recovery``). Once all that live have told, the agent starts the lost ones and tells everyone
where to meet. A rank that has not told in time is stuck, and is replaced as well: the state is in the nodes' memory,
not in the process.

The ranks of a run of several nodes are forked by a process on each node (``run.relay``). A node that is lost gives its
place to a spare one; without a spare the run is split over fewer nodes, where ``layout.elastic`` allows that.

The agent imports what ranks need and runs nothing of torch, so that what it forks starts clean (``run.local_ranks``).
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Protocol

from megatron_port.core.errors import EXIT_ENVIRONMENT, EXIT_HANG, EnvironmentFault
from megatron_port.run.agent_link import END, HUNG, LEAVE, LOST, REPLACED, RUNNING, SLOW, Restart
from megatron_port.run.local_ranks import GRACE_S, Meeting, import_for_all, local_meeting
from megatron_port.run.node_ranks import NodeRanks, RankMain, noted_signals

TELL_S = 10.0
"""Ranks that live have so long to leave their step. Then they are stuck, and are replaced."""
CAUSE_S = 1.5
"""The cause of what a rank reports, another's death, is seen within this time."""
MOST_AT_ONE_STEP = 3
"""Losses in training from the same step on. A fault that comes back is not the machine's."""
MOST_IN_A_ROW = 30
"""Starts in a row of which none came to train."""
TICK_S = 0.02
QUIET_S = 2.5
"""Silence of a node for which, of ranks that all hang, its own are replaced. Nodes beat each
second."""
SAME_SIGNAL_S = 3.0
"""A scheduler signals every node: what comes from several of them within this time is one signal."""


class Node(Protocol):
    """A node of the run: this one (``NodeRanks``), or one that is reached through a connection (``run.relay``)."""

    hostname: str
    address: str

    @property
    def quiet_s(self) -> float:
        """Seconds for which nothing was heard of it."""

    @property
    def port(self) -> int:
        """A port of the node's address that nobody listens on."""

    def start(self, new: Sequence[int], kept: Sequence[int], meeting: Meeting, recovery: Restart | None) -> int | None:
        """Start ranks, and tell others where to meet them; in a rank's process return its exit code."""

    def tell(self, local: int, kind: str, **values: Any) -> None:
        """Send a message to a rank."""

    def send_signal(self, number: int, locals_: Sequence[int] | None = None) -> None:
        """Send a signal to some ranks; None: to all."""

    def poll(self) -> None:
        """Look for what no message tells."""


@dataclass(frozen=True)
class Kept:
    """Run of an agent."""

    meeting: Meeting
    """The first, of the nodes that are asked for; hosts and address are filled in once the nodes are known."""
    main: RankMain
    """Called in each rank's process."""
    let_go: Callable[[], None]
    """Called on each node once the run has ended well, or by an error of all ranks: nothing will be recovered. Also
    where the copies on several nodes may hold what damaged a rank's state."""
    fits: Callable[[int], bool] = lambda world: False
    """Whether the run may be split over so many ranks instead."""
    failed: Callable[[str], None] = lambda why: None
    """Called with the reason where the agent ends the run."""
    left: Callable[[], bool] = lambda: True
    """Called on a node that has lost the agent, again and again: frees the memory of copies that no start would resume
    from. Returns whether none is left."""


@dataclass(eq=False)
class _Rank:
    node: Node
    local: int
    rank: int
    running: bool = False
    """It trains: it has its state."""
    told: dict[str, Any] | None = None
    """Its report of a lost peer; it waits for an answer."""
    told_at: float = 0.0
    replaced: bool = False
    """The agent ends it, to start it again; whatever its exit code."""


class Agent:
    """Agent of a run.

    Args:
        kept: the run.
        selector: of the loop; nodes register what they read.

    Attributes:
        tick: called in each turn of the loop, for connections of other nodes.
    """

    def __init__(self, kept: Kept, selector: selectors.BaseSelector) -> None:
        self._kept, self._selector = kept, selector
        self.tick: Callable[[], None] = lambda: None
        self.nodes: list[Node] = []
        """Those that live, in the order in which places are given to them."""
        self._places: list[Node | None] = [None] * len(kept.meeting.hosts)
        """Node of each place of the layout; None: it is lost."""
        self._doubted: set[Node] = set()
        """Nodes that are slow, or where something other than an update changed a rank's state. They give their place to
        a spare one."""
        self._ranks: list[_Rank] = []
        """Those that live."""
        self._number = 0
        self._lost: list[str] = []
        """Losses since the ranks last trained together."""
        self._lost_nodes: list[str] = []
        """Addresses of nodes that are lost since then."""
        self._lost_at = 0.0
        self._since = 0.0
        """When this recovery began; 0: none is under way."""
        self._asked = False
        """Ranks were asked to leave their step, as one has reported."""
        self._step = 0
        """The last that any rank told of."""
        self._at, self._times = -1, 0
        """Step of the last losses in training, and how many of them there were."""
        self._in_a_row = 0
        self._trained = False
        """This recovery follows a loss in training, not one on the way there."""
        self._below = -1
        """Copies of this step and of later ones are not to be used (``Restart.below``)."""
        self._kept_for_next = False
        """The run ends, and its next start needs the copies."""
        self._first_epoch = 0
        """Epoch of the first start that came to train; 0: none has."""
        self._noted: list[int] = []
        """Signals to this process; all that their handler touches."""
        self._signals: list[int] = []
        """Signals that came, and are not passed on yet."""
        self._signalled = (0, 0.0, False)
        """The last signal, when it came, and whether to this process."""
        self._away = False
        """From a loss until the ranks train together again."""
        self._stopping = self._agreed = False
        """A signal was passed on, or a rank failed for good: nothing is started any more. All ranks failed alike."""
        self._code, self._deadline = 0, float("inf")
        self.in_rank = False
        """This is a rank's process, forked by the agent."""

    @property
    def lets_go(self) -> bool:
        """Whether nothing will be recovered any more, once the run has ended.

        A rank whose state was damaged drops its newest copy where it is, but not the one on the next node: the next
        start, which knows nothing of it, is not to find that. Ranks that could not save the copies have dropped it.
        """
        damaged = self._below >= 0 and len(self._places) > 1
        return bool(self._first_epoch) and not self._kept_for_next and (self._agreed or damaged or not self._code)

    @property
    def is_told_to_end(self) -> bool:
        """Whether a signal to end has come that was not passed on."""
        return bool(self._signals) or self._stopping

    @property
    def has_places_filled(self) -> bool:
        """Whether there are as many nodes as the run needs."""
        return len(self.nodes) >= len(self._places)

    def run(self) -> int:
        """Start the ranks and keep them; return the exit code of the run.

        In a rank's process this returns what its main function returns.
        """
        self._fill_places()
        while True:
            own = self._start_missing()
            if own is not None:
                self.in_rank = True
                return own
            if self._serve():
                return self._code

    # Starting.

    def _fill_places(self) -> str:
        """Give every place of the layout a node. Return why that cannot be; then the places are as they were."""
        alive = [node if node in self.nodes else None for node in self._places]
        spare = [node for node in self.nodes if node not in alive and node not in self._doubted]
        for place, node in enumerate(alive):
            # The copies of the only node are on no other.
            if node in self._doubted and alive.count(None) < len(spare) and len(alive) > 1:
                alive[place] = None
        spare += [node for node in self.nodes if node not in alive and node in self._doubted]  # better than none
        filled = [node if node is not None else spare.pop(0) if spare else None for node in alive]
        if None in filled:
            here = [node for node in filled if node is not None]
            size = self._kept.meeting.size
            fewer = next((n for n in range(len(here), 0, -1) if self._kept.fits(n * size)), 0)
            if not fewer:
                left = "1 node is" if len(here) == 1 else f"{len(here)} nodes are"
                return (f"{left} left of the {len(filled)} that the run needs, and no spare one "
                        "(launch.spare_nodes); layout.elastic = true would split it over fewer where a layout fits")
            filled = [*here[:fewer]]
        self._places = filled
        return ""

    def _start_missing(self) -> int | None:
        """Start the ranks that do not live. In a rank's process return its exit code, in the agent None."""
        nodes = [node for node in self._places if node is not None]
        recovery = Restart(
            self._number, self._why(), self._lost_at, self._step, self._first_epoch, self._below
        ) if self._number else None
        first = self._kept.meeting
        meeting = replace(
            first, number=self._number, address=nodes[0].address, hosts=tuple(node.hostname for node in nodes),
            port=first.port if first.port and not self._number else nodes[0].port)
        self._since, self._asked = 0.0, False
        alive: dict[Node, dict[int, _Rank]] = {node: {} for node in nodes}
        for rank in self._ranks:
            alive[rank.node][rank.local] = rank
        for place, (node, here) in enumerate(alive.items()):
            new = [local for local in range(meeting.size) if local not in here]
            for local, rank in here.items():
                rank.told, rank.rank = None, place * meeting.size + local
            self._ranks += [_Rank(node, local, place * meeting.size + local) for local in new]
            own = node.start(new, list(here), meeting.at(place), recovery)
            if own is not None:
                return own
        return None

    # Serving.

    def _serve(self) -> bool:
        """Serve until ranks are to be started again (False), or the run has ended (True)."""
        while self._ranks or self._since:
            self.turn()
            now = time.monotonic()
            while self._noted:
                self.signalled(self._noted.pop(0), here=True)
            if self._signals:
                self._pass_on()
            if now > self._deadline:
                self._replace(self._ranks)
                self._deadline = float("inf")
            if self._since and self._gathered(now) and not self._too_often():
                return False
            self._judge(now)
        return True

    def turn(self) -> None:
        """Read what has come, and look for what no message tells."""
        for key, _ in self._selector.select(TICK_S):
            key.data()
        for node in list(self.nodes):
            node.poll()
        self.tick()

    def _rank(self, node: Node, local: int) -> _Rank | None:
        return next((r for r in self._ranks if r.node is node and r.local == local), None)

    # What nodes tell.

    def joined(self, node: Node) -> None:
        """Take a node among those that places are given to."""
        self.nodes.append(node)

    def gone(self, node: Node, why: str) -> None:
        """Take note that a node is lost, and its ranks with it."""
        if node not in self.nodes:
            return
        self.nodes.remove(node)
        self._lost_nodes.append(node.address)
        here = [rank for rank in self._ranks if rank.node is node]
        self._ranks = [rank for rank in self._ranks if rank.node is not node]
        if here and not self._stopping:
            self._lose(f"node {node.hostname} is lost: {why}", trained=any(r.running or r.told for r in here))
            self._ask_to_leave()  # again where they were asked before: now they know whom not to wait for
        elif here:
            self._give_up(EXIT_ENVIRONMENT, f"node {node.hostname} is lost: {why}")
        elif not self._stopping:
            self._say(f"the spare node {node.hostname} is lost: {why}; spare nodes left: {len(self._spares())}")

    def signalled(self, number: int, *, here: bool = False) -> None:
        """Take note of a signal that another node's process has received, or this one (``here``).

        One that has just come from another process is the same; two to this process are two.
        """
        now, (last, at, was_here) = time.monotonic(), self._signalled
        if number == last and now - at < SAME_SIGNAL_S and not (here and was_here):
            self._signalled = (number, at, here or was_here)
        else:
            self._signalled = (number, now, here)
            self._signals.append(number)

    def on_told(self, node: Node, local: int, told: dict[str, Any]) -> None:
        """Take a rank's message."""
        rank = self._rank(node, local)
        if rank is None:
            return
        if told["kind"] == RUNNING:
            rank.running, self._step = True, int(told["step"])
            self._first_epoch = self._first_epoch or int(told["epoch"])
            if not self._since and self._all_train():
                self._lost.clear()
                self._lost_nodes.clear()
                self._below = -1
                self._in_a_row, self._away = 0, False
        elif told["kind"] == HUNG:
            self._take_hung([r for r in self._ranks if r.rank in told["ranks"] and r.told is None])
        elif told["kind"] == SLOW:
            self._take_slow(next((r for r in self._ranks if r.rank == told["rank"]), None), float(told["ratio"]))
        elif told["kind"] == LOST:
            self._step = max(self._step, int(told["step"]))
            rank.told, rank.told_at, rank.running = told, time.monotonic(), False
            self._kept_for_next = self._kept_for_next or bool(told.get("keeps"))
            damaged_from = int(told["damaged_from"])
            if damaged_from >= 0:
                self._doubted.add(node)
                self._below = min(damaged_from, self._below if self._below >= 0 else damaged_from)
            if self._stopping:
                node.tell(local, END)

    def _take_hung(self, ranks: Sequence[_Rank]) -> None:
        """Replace ranks that the watch takes for hung; in a recovery all that wait do, and there is a limit to it."""
        if self._since or not ranks:
            return
        quiet = [rank for rank in ranks if rank.node.quiet_s > QUIET_S]
        if len(ranks) == len(self._ranks):  # all wait in one operation: the watch cannot tell for whom
            ranks = quiet or ranks
        names = ", ".join(str(rank.rank) for rank in ranks[:8])
        why = f"rank{'s' if len(ranks) > 1 else ''} {names} hung"
        self._replace(ranks)
        if self._stopping:
            self._give_up(EXIT_HANG, f"{why} while the run was ending")
        else:
            self._lose(why, trained=True)

    def _take_slow(self, rank: _Rank | None, ratio: float) -> None:
        """Give the place of a slow rank's node to a spare one; without a spare nothing is gained."""
        if self._since or self._stopping or rank is None or rank.node in self._doubted:
            return
        if not self._spares() or len(self._places) == 1:
            return
        self._doubted.add(rank.node)
        self._replace([rank])
        where = f"rank {rank.rank} on {rank.node.hostname}"
        self._lose(f"{where} takes {ratio:.2f} times as long as its peers", trained=True)

    def _spares(self) -> list[Node]:
        return [node for node in self.nodes if node not in self._places and node not in self._doubted]

    def on_ended(self, node: Node, local: int, code: int, hint: str = "") -> None:
        """Take note of a rank's end: done, lost, or a fault that would come again."""
        rank = self._rank(node, local)
        if rank is None:
            return
        self._ranks.remove(rank)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        how += f" ({hint})" if hint else ""
        if self._stopping or code == -signal.SIGINT:
            self._give_up(128 - code if code < 0 else code, f"rank {rank.rank} {how}" if code < 0 else "")
        elif code < 0 or code in (1, EXIT_HANG) or rank.replaced:
            self._lose("" if rank.replaced else f"rank {rank.rank} {how}", trained=rank.running)
        elif code:
            self._give_up(code)

    def on_stopped(self, node: Node, local: int) -> None:
        """Replace a rank that a signal has stopped: it cannot leave, and keeps those waiting that wait for it."""
        rank = self._rank(node, local)
        if rank is not None and self._since and not rank.replaced and rank.told is None:
            self._lost.append(f"rank {rank.rank} is stopped")
            self._replace([rank])

    # Deciding.

    def _lose(self, what: str, *, trained: bool = False) -> None:
        """Begin a recovery, or add to the one under way. ``trained``: the rank that was lost had its state."""
        if what:
            self._lost.append(what)
        if not self._since:
            self._since, self._lost_at, self._away = time.monotonic(), time.time(), True
            self._trained = trained or any(r.running or r.told is not None for r in self._ranks)
            self._ask_to_leave()
        # Ranks on their way to a meeting that cannot be held have nothing to lose, and would wait for long.
        self._replace([r for r in self._ranks if not r.running and r.told is None and not r.replaced])

    def _ask_to_leave(self) -> None:
        for rank in self._ranks:
            if rank.running:
                rank.node.tell(rank.local, LEAVE, nodes=self._lost_nodes)

    def _all_train(self) -> bool:
        return len(self._ranks) == len(self._places) * self._kept.meeting.size and all(r.running for r in self._ranks)

    def _replace(self, ranks: Sequence[_Rank]) -> None:
        for rank in ranks:
            rank.replaced = True
            rank.node.send_signal(signal.SIGKILL, [rank.local])

    def _gathered(self, now: float) -> bool:
        """Whether every rank that lives has left its step and has a place; those that are stuck are replaced."""
        busy = [r for r in self._ranks if r.told is None or r.replaced]
        if busy and now - self._since > TELL_S:
            self._lost += [f"rank {r.rank} did not leave its step within {TELL_S:g} s" for r in busy if not r.replaced]
            self._replace(busy)
        if busy:
            return False
        problem = self._fill_places()
        if problem:
            self._give_up(EXIT_ENVIRONMENT, f"{self._why()}: {problem}")
            return False
        without = [r for r in self._ranks if r.node not in self._places]
        self._replace(without)
        return not without

    def _too_often(self) -> bool:
        """Count this recovery; give up where the step is the same again and again."""
        if self._trained:
            self._times = self._times + 1 if self._step == self._at else 1
            self._at = self._step
        self._in_a_row += 1
        often = self._times > MOST_AT_ONE_STEP
        if often or self._in_a_row > MOST_IN_A_ROW:
            count = (f"the {self._times}th loss since a copy or checkpoint of step {self._at} was the newest" if often
                     else f"none of the last {MOST_IN_A_ROW} starts came to train")
            self._give_up(self._code or EXIT_ENVIRONMENT,
                          f"{self._why()}: {count}, so it is not one rank that happened to die; the run ends")
            return True
        self._number += 1
        kept, world = len(self._ranks), len(self._places) * self._kept.meeting.size
        self._say(f"recovery {self._number}: {self._why()}; ranks that keep their processes: {kept}, that are started "
                  f"again: {world - kept}{self._of_nodes()}")
        return False

    def _of_nodes(self) -> str:
        """Return the nodes of the next start and the spare ones that are left, where there are several."""
        if len(self._places) + len(self.nodes) < 3:
            return ""
        names = ", ".join(node.hostname for node in self._places if node)
        return f"; nodes: {names}; spare nodes left: {len(self._spares())}"

    def _why(self) -> str:
        shown = "; ".join(self._lost[:4])
        return shown + (f"; and {len(self._lost) - 4} more" if len(self._lost) > 4 else "")

    def _judge(self, now: float) -> None:
        """Decide about reports without a death: an error of all ranks, of one alone, or a link that was cut."""
        waiting = [r for r in self._ranks if r.told is not None]
        waited = now - min((r.told_at for r in waiting), default=now)
        if self._since or self._stopping or waited < CAUSE_S:
            return
        if len(waiting) < len(self._ranks) and waited < TELL_S:
            if not self._asked:
                self._asked = True
                self._ask_to_leave()  # the others may compute for a while, or wait inside of NCCL
            return
        own = [(r, r.told) for r in waiting if r.told is not None and not r.told["victim"]]
        if len(own) == len(self._ranks):
            self._agreed = True
            self._give_up(0)  # each raises it
            self._deadline = min(self._deadline, now + GRACE_S)
        elif own:
            for rank, told in own:
                why = str(told["why"]).partition("\n")[0]
                self._lost.append(f"rank {rank.rank} failed alone: {why[:300]}")
                rank.told, rank.replaced = None, True
                rank.node.tell(rank.local, REPLACED)
            self._lose("", trained=True)
        else:
            why = str(waiting[0].told["why"]) if waiting[0].told is not None else ""
            self._lose(f"rank {waiting[0].rank} lost a peer although all processes live ({why[:300]})")

    def _give_up(self, code: int, line: str = "") -> None:
        """Start nothing any more; the ranks that wait raise what they met."""
        if code and not self._code:
            self._code = code
            if line:
                self._say(f"error: {line}")
                self._kept.failed(line)
        self._stopping, self._since = True, 0.0
        if code:
            self._deadline = min(self._deadline, time.monotonic() + GRACE_S)
        self._answer_waiting()

    def _answer_waiting(self) -> None:
        for rank in self._ranks:
            if rank.told is not None:
                rank.told = None
                rank.node.tell(rank.local, END)

    def interrupted(self, number: int, frame: FrameType | None) -> None:
        """Take note of a terminal's Ctrl-C, which reaches the ranks by itself."""
        self._stopping = True

    def note_signal(self, number: int, frame: FrameType | None) -> None:
        """Take note of a signal to this process."""
        self._noted.append(number)

    def _pass_on(self) -> None:
        """Pass signals on; during a recovery once the ranks train again, when they can save. A second one at once."""
        waiting = [r for r in self._ranks if r.told is not None]
        if (self._away or waiting) and len(self._signals) < 2 and not self._stopping:
            return
        self._stopping, self._since = True, 0.0
        for node in self.nodes:
            for number in self._signals:
                node.send_signal(number)
        self._answer_waiting()
        self._signals.clear()

    @staticmethod
    def _say(line: str) -> None:
        with suppress(OSError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()


def run_kept(
    nproc: int, rank_main: RankMain, let_go: Callable[[], None], *, preload: Sequence[str] = (), port: int | None = None
) -> int:
    """Fork ``nproc`` ranks, keep them, and return the exit code of the run; in a rank, what ``rank_main`` returns.

    Raises:
        ConfigError, EnvironmentFault: as ``run.local_ranks.run_local``.
    """
    meeting = local_meeting(nproc, port)
    refuse_without_fork()
    import_for_all(preload)
    selector = selectors.DefaultSelector()
    agent = Agent(Kept(meeting, rank_main, let_go), selector)
    with noted_signals(agent.note_signal, agent.interrupted) as restore:
        agent.joined(NodeRanks(selector, rank_main, agent, restore))
        code = agent.run()
        if agent.lets_go and not agent.in_rank:
            let_go()
        return code


def refuse_without_fork() -> None:
    """Raise EnvironmentFault on a system that cannot fork processes."""
    if not hasattr(os, "fork"):
        raise EnvironmentFault('launch.when_lost "replace" needs a system that can fork processes')
