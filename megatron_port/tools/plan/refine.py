"""Choices that are too many to be enumerated, made for layouts that a search has found: each at least as fast.

The layers split by the planned seconds of the units, which no other split has a faster slowest stage than; pieces of a
product whose collective runs beside the next one; no more of the optimizer off the device than has to be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.pipeline.partition import balanced_layers
from megatron_port.tools.plan.case import Case, Machine
from megatron_port.tools.plan.memory import StageMemory, plan_memory, stage_memory
from megatron_port.tools.plan.offload import host_problem
from megatron_port.tools.plan.search import Candidate, fullest, is_legal
from megatron_port.tools.plan.step import plan_step, unit_seconds

STEPS = 20
"""Shares of the optimizer that are told apart: a twentieth."""
PIECES = (2, 4, 8)
"""Values of layout.tp_overlap_chunks."""


def refined(config: RunConfig | None, found: Candidate, machine: Machine) -> Candidate:
    """The layout with each of these choices that makes it faster, fits and is legal (None: legality is not judged)."""
    kinds: tuple[Callable[[Candidate, Machine], Iterator[Case]], ...] = (_splits, _pieces, _shares)
    for cases in kinds:
        now = plan_step(found.case, machine, quick=True).seconds
        tried = sorted(((plan_step(case, machine, quick=True).seconds, i, case) for i, case in
                        enumerate(cases(found, machine))), key=lambda one: one[:2])
        for seconds, _, case in tried:
            if seconds >= now or (config is not None and not is_legal(config, case)):
                continue
            # Pieces of a product hold what the whole does.
            memory = found.memory if cases is _pieces else _memory(case, machine)
            if memory.total <= machine.cluster.memory_gb * 1e9 and not host_problem(case, machine):
                one = Candidate(case=case, step=plan_step(case, machine), memory=memory)
                found = one if one.step.seconds < found.step.seconds else found
                break
    return found


def _memory(case: Case, machine: Machine) -> StageMemory:
    """The fullest stage; of a plan of activations, which no formula orders by stages, all are counted."""
    return max(plan_memory(case, machine), key=lambda m: m.total) if case.dropped else fullest(case, machine)


def _splits(found: Candidate, machine: Machine) -> Iterator[Case]:
    """The layers split by seconds instead of FLOPs. A plan of activations is of one split, and stays."""
    case = found.case
    if case.pp * case.vp > 1 and not case.dropped:
        split = balanced_layers(unit_seconds(case, machine), case.pp * case.vp)
        if split != case.split:
            yield replace(case, split=split)


def _pieces(found: Candidate, machine: Machine) -> Iterator[Case]:
    """A tensor-parallel product in pieces, where the engine and the run's positions allow it."""
    case = found.case
    if case.tp == 1 or case.fine_tuning.enabled or case.dtype == "fp8":
        return
    positions = case.model.seq_length // case.cp // (case.tp if case.sequence_parallel else 1)
    for pieces in (1, *PIECES):
        if pieces != case.tensor_chunks and positions % pieces == 0:
            yield replace(case, tensor_chunks=pieces)


def _shares(found: Candidate, machine: Machine) -> Iterator[Case]:
    """The least share of the optimizer's state off the device with which the layout fits: memory falls with it."""
    case = found.case
    if case.offload == "none" or case.offload_weights or not case.offload_fraction:
        return
    headroom = machine.cluster.memory_gb * 1e9 - found.memory.total
    less = replace(case, offload_fraction=case.offload_fraction / 2)
    more = stage_memory(less, machine, found.memory.stage).total - found.memory.total
    bytes_per_fraction = more / (case.offload_fraction / 2)
    if headroom <= 0 or bytes_per_fraction <= 0:
        return
    least = math.ceil(STEPS * max(case.offload_fraction - headroom / bytes_per_fraction, 1 / STEPS)) / STEPS
    for step in range(3):  # another stage may be the fullest then
        if least + step / STEPS < case.offload_fraction:
            yield replace(case, offload_fraction=least + step / STEPS)
