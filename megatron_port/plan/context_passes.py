"""Memory of attention whose positions context-parallel ranks divide, by method (programs of ``plan.tape``)."""

from __future__ import annotations

from dataclasses import replace

from megatron_port.plan.attention_cores import Heads, fused_core, scores_core
from megatron_port.plan.operations import Sizes
from megatron_port.plan.tape import Block, Tape, Value


def context_core(t: Tape, s: Sizes, h: Heads, heads: tuple[Value, Value, Value]) -> Value:
    """Attention of a rank's queries to what it may see of the whole sequence."""
    program = {"gather": _with_gathered_keys, "heads": _with_all_positions, "ring": _in_ring}[s.case.cp_method]
    if s.case.recompute == "selective":
        return t.checkpoint(lambda tape, *heads: program(tape, s, h, *heads), *heads)
    return program(t, s, h, *heads)


def _with_gathered_keys(t: Tape, s: Sizes, h: Heads, q: Value, k: Value, v: Value) -> Value:
    """``parallel.context_attention.GatherKeys``."""
    program = fused_core if s.case.flash else scores_core
    return program(t, s, h, q, _gathered(t, s, h, k), _gathered(t, s, h, v))


def _gathered(t: Tape, s: Sizes, h: Heads, x: Value) -> Value:
    """Keys or values of all positions: the ranks' own, one after another, are put in the sequence's order."""
    return _moved(t, s, x, h.k, h.all_k)


def _moved(t: Tape, s: Sizes, x: Value, before: float, after: float, *, to_order: bool = True) -> Value:
    """What a collective makes of ``before`` bytes, put in the sequence's order behind it, or taken from that order
    before it; backward the other way round."""
    moved = s.case.cp_order != "contiguous"

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        return [_collective(t, after, before, first=moved and to_order, last=moved and not to_order)]

    out = _collective(t, before, after, first=moved and not to_order, last=moved and to_order)
    return t.note(out, [x], backward)


def _collective(t: Tape, before: float, after: float, *, first: bool, last: bool) -> Block:
    """The result of a collective; rows are rearranged ``first``, or those of its result ``last``."""
    arranged = t.block(before) if first else None
    out = t.block(after)
    del arranged
    return t.block(after) if last else out


def _with_all_positions(t: Tape, s: Sizes, h: Heads, q: Value, k: Value, v: Value) -> Value:
    """``parallel.head_attention.ExchangeHeads``: all positions of some heads, in tensors as large as the rank's own."""
    each = max(h.k, h.k * s.case.cp / s.held_keys)  # copies, where there are fewer heads of keys than ranks
    whole = h.q + 2 * each
    packed = t.note(
        t.block(whole), [q, k, v], lambda grad, saved: [t.block(h.q), t.block(h.k), t.block(h.k)]
    )
    packed = _moved(t, s, packed, whole, whole)
    q, k, v = t.split(packed, lambda grad, saved: [t.block(whole)], 3)
    h = replace(h, k=each, all_k=each)
    out = (fused_core if s.case.flash else scores_core)(t, s, h, q, k, v)
    out = _moved(t, s, out, h.q, h.q, to_order=False)
    return t.note(t.block(h.q), [out], lambda grad, saved: [t.block(h.q)])


def _in_ring(t: Tape, s: Sizes, h: Heads, q: Value, k: Value, v: Value) -> Value:
    """``parallel.ring_attention.RingKeys``: two windows of keys and values, partial results in full width."""
    wide, rows = s.ratio, h.q / s.case.width / s.case.model.head_size * s.case.wide
    runs = 1 if s.case.cp_order == "contiguous" else 2
    block = 0.0 if s.case.flash else h.scores / s.case.cp / runs * wide
    operands = (h.q / runs + 2 * h.k) * wide

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        windows = t.block(4 * h.k), t.block(2 * 2 * h.k * wide)
        gradient = t.block(h.q * wide)
        t.meter.need(5 * block, 2 * operands)
        del windows, gradient
        return [t.block(h.q), t.block(h.k), t.block(h.k)]

    merged = t.block(h.q * wide), t.block(2 * rows)
    windows = t.block(4 * h.k)
    t.meter.need(3 * block, operands, h.q / runs * wide)
    del windows
    out = t.block(h.q) if wide > 1 else merged[0]
    return t.note(out, [q, k, v], backward, [q.block, k.block, v.block, out, merged[1]])
