"""Memory of a stage through a step: the engine's own schedule, replayed with the bytes of every pass and message.

The order of passes, the receives that are started ahead and the moment at which a send's memory is free again are those
of ``pipeline.schedules.turns``, which the engine's runner follows; what a pass allocates comes from ``plan.meter``.

A replay has two halves. :func:`occupancy` follows a schedule and counts, at each pass, what the stage holds; it knows
no bytes, so it is made once for a schedule and shared by thousands of cases. :func:`peak_of` multiplies by bytes.

Weight passes count as done before the forward pass whose exchanges they fill (``pipeline.schedules``): the operands of
their products are freed one after the other while that pass saves its activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import ge

from megatron_port.core.dist.mesh import Topology
from megatron_port.core.pipeline.schedules import (
    AHEAD,
    Action,
    Kind,
    Message,
    Schedule,
    Turn,
    interleaved,
    make_schedule,
    one_f_one_b,
    turns,
)
from megatron_port.core.registry import SCHEDULES
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.chunk import ChunkBytes, chunk_bytes

STEADY = 3
"""Groups of p micro-batches after which a schedule repeats the same passes: more of them hold nothing more (under zb-v,
whose list is not periodic, one or two messages; tests/unit/test_plan_ledger.py). GPipe holds all its micro-batches."""


@dataclass(frozen=True)
class Moment:
    """Micro-batches and messages that a stage holds while one pass runs, by chunk where they differ."""

    kind: Kind
    chunk: int
    held: tuple[int, ...]
    """Micro-batches between forward and backward pass, that of a running backward pass included."""
    deferred: tuple[int, ...]
    """Micro-batches whose weight pass is still to come, that of a running one included."""
    inputs: int
    """Inputs of the chunks' held micro-batches, that of a running pass included."""
    messages: int
    """Outputs and gradients that wait here, are being sent or received, or are held by the pass."""

    @property
    def micro_batches(self) -> int:
        """Pairs of a micro-batch and a chunk that take memory, the running one included."""
        return sum(self.held) + sum(self.deferred) + (self.kind is Kind.FORWARD)

    def counts(self) -> tuple[int, ...]:
        """All counts: a moment at which none is larger than at another of the same pass needs no more memory."""
        return (*self.held, *self.deferred, self.inputs, self.messages)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The fullest moment of a step's passes, in bytes."""

    activations: float
    """Held for backward and weight passes to come, logits left out."""
    logits: float
    """Logits, of all micro-batches that wait for their backward pass."""
    working: float
    """Allocated by the pass beyond that."""
    messages: float
    """Activations and gradients between stages."""
    in_flight: float
    """Micro-batches that are held at most in the step, in units of the whole stage."""
    at: str

    @property
    def total(self) -> float:
        """All of it."""
        return self.activations + self.logits + self.working + self.messages


def steady_count(name: str, stages: int, micro_batches: int) -> int:
    """Return the smallest number of micro-batches that holds as much at every stage as ``micro_batches`` do."""
    if name == "gpipe" or name in SCHEDULES.added:
        return micro_batches
    return min(micro_batches, STEADY * stages + micro_batches % stages)


@lru_cache(maxsize=4096)
def occupancy(name: str, stages: int, micro_batches: int, chunks: int, stage: int) -> tuple[Moment, ...]:
    """Return the moments of a stage's step that no other moment outweighs."""
    schedule = make_schedule(name, stages, micro_batches, chunks)
    return _undominated(_moments(turns(schedule, stage), chunks))


@lru_cache(maxsize=4096)
def quick_occupancy(
    name: str, stages: int, micro_batches: int, chunks: int, stage: int, group: int = 0
) -> tuple[Moment, ...]:
    """Return the moments of a stage's step from its own list of passes, without the order of all messages.

    ``group``: as ``pipeline.schedules.interleaved`` takes it.
    """
    schedule = Schedule(name, Topology(pp=stages, vp=chunks, folded=name == "zb-v"), micro_batches, ())
    plan: Sequence[Action]
    if name == "1f1b" and chunks == 1:
        plan = one_f_one_b(stage, stages, micro_batches)
    elif name == "1f1b":
        plan = interleaved(stage, stages, chunks, micro_batches, group)
    else:
        plan = make_schedule(name, stages, micro_batches, chunks).plans[stage]
    return _undominated(_moments(_usual_turns(schedule, stage, plan), chunks))


def _usual_turns(schedule: Schedule, stage: int, plan: Sequence[Action]) -> Iterator[Turn]:
    """Turns in which one receive of each direction is started ahead, and a gradient is taken before the next leaves."""
    arrives: dict[bool, list[Message]] = {True: [], False: []}
    for action in plan:
        before = schedule.before(stage, action)
        if before is not None and before[0] != stage:
            arrives[action.kind is Kind.FORWARD].append(Message(before[0], stage, action))
    posted, taken = {True: 0, False: 0}, {True: 0, False: 0}
    sent: tuple[Message, ...] = ()
    for action in plan:
        before, after = schedule.before(stage, action), schedule.after(stage, action)
        receive = send = keep = None
        if before is not None and before[0] != stage:
            down = action.kind is Kind.FORWARD
            receive = arrives[down][taken[down]]
            taken[down] += 1
        if after is not None and after[0] == stage:
            keep = after[1]
        elif after is not None:
            send = Message(stage, after[0], after[1])
        post: list[Message] = []
        for down, messages in arrives.items():
            post += messages[posted[down] : taken[down] + AHEAD]
            posted[down] = min(len(messages), taken[down] + AHEAD)
        completed = sent if send is not None and not send.downstream else ()
        sent = (send,) if send is not None and not send.downstream else () if completed else sent
        yield Turn(action, tuple(post), receive, send, keep, completed)


def _undominated(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    found: dict[tuple[Kind, int], dict[tuple[int, ...], Moment]] = {}
    for moment in moments:
        found.setdefault((moment.kind, moment.chunk), {}).setdefault(moment.counts(), moment)
    out: list[Moment] = []
    for alike in found.values():
        largest: list[tuple[int, ...]] = []
        for counts in sorted(alike, reverse=True):  # what outweighs another comes before it
            if not any(all(map(ge, other, counts)) for other in largest):
                largest.append(counts)
        out += [alike[counts] for counts in largest]
    return tuple(out)


def _moments(plan: Iterable[Turn], chunks: int) -> Iterator[Moment]:
    """Follow the runner (``pipeline.runner``) turn by turn.

    The output of a chunk is held with its graph until its backward pass, whether it is being sent meanwhile or is the
    input of the stage's next chunk; it is counted there and not as a message.
    """
    held, deferred = [0] * chunks, [0] * chunks
    messages = 0
    inputs: set[tuple[int, int]] = set()
    handed: set[Action] = set()
    for turn in plan:
        action, place = turn.action, (turn.action.chunk, turn.action.micro_batch)
        messages += len(turn.post) - sum(not message.downstream for message in turn.completed_sends)
        if action.kind is Kind.FORWARD and turn.receive is not None:  # the message is the chunk's input from now on
            inputs.add(place)
            messages -= 1
        yield Moment(action.kind, action.chunk, tuple(held), tuple(deferred), len(inputs), messages)
        if action.kind is Kind.FORWARD:
            held[action.chunk] += 1
        elif action.kind is Kind.WEIGHT:
            deferred[action.chunk] -= 1
        else:
            held[action.chunk] -= 1
            deferred[action.chunk] += action.kind is Kind.INPUT
            inputs.discard(place)
            # The output's gradient is gone; the input's goes to another stage, or to a chunk of this one.
            messages -= turn.receive is not None or action in handed
            messages += turn.send is not None or turn.keep is not None
            if turn.keep is not None:
                handed.add(turn.keep)


def peak_of(case: Case, stage: int, *, quick: bool = False) -> Peak:
    """Return the peak of a step's passes on a rank of ``stage``, in bytes beyond weights, sums and optimizer.

    ``quick``: the stage's own list of passes alone, with messages at their usual number.
    """
    chunks = [
        case.engine.chunk(case, chunk_bytes(case, *ends), ends[1] - ends[0]) for ends in chunk_ends(case, stage)
    ]
    count = steady_count(case.schedule, case.pp, case.micro_batches)
    if quick and count < case.micro_batches:
        count = min(count, STEADY * case.pp)  # one schedule for all numbers of micro-batches
    if case.group:
        moments = quick_occupancy(case.schedule, case.pp, case.micro_batches, case.vp, stage, case.group)
    else:
        moments = (quick_occupancy if quick else occupancy)(case.schedule, case.pp, count, case.vp, stage)
    most = max(moment.micro_batches for moment in moments) / len(chunks)
    return max((_peak_at(moment, chunks, most) for moment in moments), key=lambda peak: peak.total)


def chunk_ends(case: Case, stage: int) -> list[tuple[int, int, bool]]:
    """Return (first layer, one after the last, whether a split backward pass leaves weight products) of each chunk."""
    splits = case.schedule in ("zb-h1", "zb-v") or _plugin_splits(case)
    return [(start, stop, splits) for start, stop in case.of_stage(case.layer_ranges, stage)]


def _plugin_splits(case: Case) -> bool:
    if case.schedule not in SCHEDULES.added:
        return False
    return make_schedule(case.schedule, case.pp, case.micro_batches).splits_backward


def _peak_at(moment: Moment, chunks: list[ChunkBytes], most: float) -> Peak:
    running, stream = chunks[moment.chunk], chunks[moment.chunk].stream
    held = sum(n * (c.kept - c.logits + c.output) for n, c in zip(moment.held, chunks))
    held += sum(n * c.deferred for n, c in zip(moment.deferred, chunks)) + moment.inputs * stream
    working = running.working[moment.kind]
    count = moment.micro_batches
    name = {Kind.FORWARD: "forward", Kind.WEIGHT: "weight"}.get(moment.kind, "backward")
    where = f" of chunk {moment.chunk}" if len(chunks) > 1 else ""
    return Peak(
        activations=held, logits=sum(n * c.logits for n, c in zip(moment.held, chunks)), working=working,
        messages=moment.messages * stream, in_flight=most,
        at=f"a {name} pass{where} with {count} micro-batch{'' if count == 1 else 'es'} in flight",
    )
