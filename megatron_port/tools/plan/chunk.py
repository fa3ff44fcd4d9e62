"""Bytes of one micro-batch's passes through a chunk: its units' programs (``plan.meter``), run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.moe_spec import moe_of
from megatron_port.core.pipeline.actions import Kind
from megatron_port.tools.plan.activations import Away, away
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.ends import embedding, head, prediction
from megatron_port.tools.plan.meter import layer
from megatron_port.tools.plan.operations import Sizes
from megatron_port.tools.plan.rule_cost import ADAMW
from megatron_port.tools.plan.tape import Block, Meter, Tape, Value

ALIKE = 3
"""Layers of one kind in a row that are run; each further one holds as much as the second of them."""


@dataclass(frozen=True)
class ChunkBytes:
    """Bytes of a chunk's passes for one micro-batch."""

    stream: float
    """An input, an output or a gradient of one."""
    output: float
    """The output where it is held with its graph; none where that ends in the loss."""
    kept: float
    """Held from the forward pass to the backward pass, input and output left out."""
    logits: float
    """The part of ``kept`` that is logits."""
    deferred: float
    """Held from a split backward pass to its weight pass."""
    layers: float
    """Allocated by the backward passes of layers, those of embedding and head left out."""
    layer_left: float
    """Bytes after a layer's backward pass, less those before."""
    working: dict[Kind, float]
    """Allocated by each kind of pass beyond what it finds, its results included."""


@dataclass
class _Unit:
    """One unit's part in a run of a chunk, in bytes."""

    more: int
    """Units alike that were not run."""
    kept: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    left: float = 0.0
    """Bytes after its backward pass, results included, less those before."""


def _alike(case: Case) -> Case:
    """A case with the same passes as ``case``, and as others."""
    return replace(
        case, pp=1, vp=1, dp=1, shard=0, split=(), schedule="1f1b", zero_stage=0, reshard="forward", bucket=1,
        global_batch=1, micro_batches=1, rule=ADAMW, offload="none", offload_weights=False, dropped=(),
        imbalance=1.0,
        ep=case.ep if case.on_cpu else min(case.ep, 2),  # a CPU widens the weights of a product
    )


def layer_bytes(case: Case, index: int) -> float:
    """Return the bytes that a layer keeps of one micro-batch between forward and backward, its input included."""
    run = _run(_alike(case), index, index + 1, False, False, False)
    return run.kept + run.stream


def chunk_bytes(case: Case, start: int, stop: int, splits: bool) -> ChunkBytes:
    """Return the bytes of layers [start, stop), with the embedding and the head where they are at the ends."""
    layers = case.model.num_layers
    alike = _alike(case)
    first, last = start == 0, stop == layers
    elsewhere = away(case, start, stop) if case.dropped else []
    more = 0
    if _all_alike(case.model):  # then it does not matter which layers they are, and a few are run for any number
        more = max(stop - start - ALIKE, 0)
        start, stop = 0, stop - start - more
    else:
        start, stop = _first_like(case.model, start, stop)
    found = _chunk_bytes(_run(alike, start, stop, first, last, splits), more)
    if case.ep > 1 and case.imbalance > 1:
        return _uneven(found, _more_rows(alike, case.imbalance, start, stop))
    if not case.dropped:
        return found
    none, full = (
        _chunk_bytes(_run(replace(alike, recompute=policy), start, stop, False, False, splits), more)
        for policy in ("none", "full")
    )
    return _without(found, elsewhere, none, full, first=first)


@lru_cache(maxsize=256)
def _all_alike(model: ModelConfig) -> bool:
    return len(model_spec(model).kinds()) == 1


@lru_cache(maxsize=4096)
def _first_like(model: ModelConfig, start: int, stop: int) -> tuple[int, int]:
    """Return the first layers of the same kinds in the same order, so that they are run once."""
    layers, count = [id(layer) for layer in model_spec(model).layers], stop - start
    first = next(i for i in range(start + 1) if layers[i : i + count] == layers[start:stop])
    return first, first + count


def _uneven(found: ChunkBytes, more: float) -> ChunkBytes:
    """Return the bytes of a chunk on a rank that has most rows in the layer that runs, ``more`` bytes. In the layers
    that wait it has the mean: which rank has most differs from layer to layer."""
    passes = {kind: size + (more if kind is not Kind.WEIGHT else 0.0) for kind, size in found.working.items()}
    return replace(found, working=passes)


@lru_cache(maxsize=4096)
def _more_rows(alike: Case, imbalance: float, start: int, stop: int) -> float:
    """Bytes that a layer of experts keeps beyond those of a balanced one, the most of layers [start, stop)."""
    layers = model_spec(alike.model).layers[start:stop]
    kinds = {id(layer): start + i for i, layer in enumerate(layers) if moe_of(layer) is not None}
    cases = [replace(alike, recompute="none", imbalance=x) for x in (imbalance, 1.0)]
    kept = [[_run(case, i, i + 1, False, False, False).kept for case in cases] for i in kinds.values()]
    return max((uneven - even for uneven, even in kept), default=0.0)


def _without(
    found: ChunkBytes, elsewhere: list[Away], none: ChunkBytes, full: ChunkBytes, *, first: bool
) -> ChunkBytes:
    """Return the bytes of a chunk whose layers do not keep all that they made.

    It comes back for the backward pass of the layer, what is swapped while the layer above runs. In the layer's forward
    pass there is no more than without any recompute, nor more than with full recompute and what is kept; what is
    swapped or partitioned is there in whole, and what the layer before it swaps, as well. ``none``, ``full``: of the
    layers alone; ``first``: the embedding is in front of them.
    """
    layers, forward = len(elsewhere), Kind.FORWARD
    each = none.kept / layers, full.kept / layers
    alone = [one.working[forward] - (layers - 1) * kept for one, kept in zip((none, full), each)]
    most = max(each[0] - each[1] - (alone[0] - alone[1]), 0.0)
    before = [0.0, *(a.swapped for a in elsewhere)]
    at_layers, gone = 0.0, 0.0
    for i, (one, behind) in enumerate(zip(elsewhere, before)):
        missing = max(one.recomputed - most, 0.0) - behind
        at_layers = max(at_layers, none.working[forward] - (layers - 1 - i) * each[0] - gone - missing)
        gone += one.saved
    layer, above = 0.0, found.layers - none.layers  # the head's, which is done when the layers run backward
    for one, behind in zip(reversed(elsewhere), reversed(before[:-1])):
        layer = max(layer, none.layers + above + one.saved + behind)
        above += none.layer_left + one.saved  # what was not kept is not freed either
    leaving = before[-1]
    working = {
        kind: max(found.working[kind] + (leaving if found.working[kind] > found.layers else 0.0), layer)
        for kind in (Kind.BACKWARD, Kind.INPUT)
    }
    ends = found.kept - none.kept - found.logits  # the embedding's, which are there when the layers run
    working[forward] = max(found.working[forward] + leaving - gone, at_layers + (ends if first else 0.0))
    return replace(found, kept=found.kept - gone, working=found.working | working)


@dataclass(frozen=True)
class _Run:
    """Measured bytes of units that were run, embedding and head where ``first`` and ``last``; see ``ChunkBytes``."""

    units: tuple[_Unit, ...]
    stream: float
    output: float
    kept: float
    logits: float
    held: float
    """By what a split backward pass defers."""
    widest_product: float
    first: bool
    last: bool
    splits: bool


@lru_cache(maxsize=4096)
def _run(case: Case, start: int, stop: int, first: bool, last: bool, splits: bool) -> _Run:
    """Run the passes of layers [start, stop)."""
    s, meter = Sizes(case), Meter()
    units, programs = _programs(s, start, stop, first, last)
    tape, ends = Tape(meter, defers=splits), [0]
    x = source = Value(Block(meter, 0.0 if first else s.stream))
    begin = meter.now
    for unit, program in zip(units, programs):
        before = meter.now
        meter.mark()
        x = program(tape, x)
        ends.append(len(tape))
        unit.forward, unit.kept = meter.peak - begin, meter.now - before
    gradient = Block(meter, x.size)
    gradient.readers = 1  # the runner holds it
    at_rest = meter.now
    kept = at_rest - begin - 2 * x.size
    tape.seed(x, gradient)
    for unit, end in zip(reversed(units), reversed(ends[:-1])):
        before = meter.now
        meter.mark()
        tape.run(down_to=end)
        unit.backward, unit.left = meter.peak - at_rest, meter.now - before
    held = {id(block): block.size for block in tape.deferred}
    del source
    return _Run(
        tuple(units), stream=s.stream, output=0.0 if last else x.size, kept=kept,
        logits=(1 + case.model.mtp_layers) * s.logits if last else 0.0, held=sum(held.values()),
        widest_product=s.widest_product, first=first,
        last=last, splits=splits,
    )


def _chunk_bytes(run: _Run, more: int) -> ChunkBytes:
    """Return the bytes of a chunk with ``more`` layers, like the second, than were run."""
    second = run.first + 1
    units = [replace(u, more=u.more + more) if i == second else u for i, u in enumerate(run.units)]
    return ChunkBytes(
        stream=run.stream, output=run.output, kept=run.kept + sum(unit.more * unit.kept for unit in units),
        logits=run.logits,
        deferred=run.held + sum(u.more * (u.kept + u.left) for u in units) if run.splits else 0.0,
        layer_left=units[len(units) // 2].left,
        layers=_most_backward(units[run.first : len(units) - run.last], units[len(units) - run.last :]),
        working={
            Kind.FORWARD: max(u.forward + sum(v.more * v.kept for v in units[:i]) for i, u in enumerate(units)),
            Kind.BACKWARD: _most_backward(units), Kind.INPUT: _most_backward(units), Kind.WEIGHT: run.widest_product,
        },
    )


def _most_backward(units: list[_Unit], above: Sequence[_Unit] = ()) -> float:
    """The peak of the backward pass: units that were not run have been freed where the pass is below them. ``above``:
    further ones, whose own peaks are left out."""
    all_units = [*units, *above]
    peaks = (u.backward + sum(v.more * v.left for v in all_units[i + 1 :]) for i, u in enumerate(units))
    return max(peaks, default=0.0)  # other programs have chunks with an embedding or a head alone


Step = Callable[[Tape, Value], Value]


def _programs(s: Sizes, start: int, stop: int, first: bool, last: bool) -> tuple[list[_Unit], list[Step]]:
    """The units of a chunk and their programs; of layers alike in a row three, the second of which stands for more."""
    units: list[_Unit] = []
    programs: list[Step] = []
    if first:
        units.append(_Unit(0))
        programs.append(lambda tape, x: embedding(tape, s))
    for spec, count in model_spec(s.case.model).kinds(start, stop):
        run = min(count, ALIKE)
        units += [_Unit(count - run if i == 1 else 0) for i in range(run)]
        programs += [lambda tape, x, spec=spec: layer(tape, s, spec, x)] * run  # type: ignore[misc]
    if last:
        units.append(_Unit(0))
        programs.append(lambda tape, x: _losses(tape, s, x))
    return units, programs


def _losses(t: Tape, s: Sizes, x: Value) -> Value:
    """The head, and the modules that predict further tokens."""
    hidden, loss = head(t, s, x)
    for part in model_spec(s.case.model).head.predictions:
        hidden, further = prediction(t, s, part, hidden)
        loss = t.note(t.block(loss.size), [loss, further], lambda grad, saved: [grad, grad])
    return loss
