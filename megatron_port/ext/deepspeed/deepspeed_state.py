"""DeepSpeed's ZeRO-1 state by canonical name: each rank's shard_ranges, without communication.

ZeRO-1 flattens a parameter group and gives each replica a contiguous range of
it, so a rank owns a contiguous range of some parameters' flattened local
slices. The engine's own mapping (``_hp_mapping``) says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from megatron_port.core.dist.context import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS
from megatron_port.core.dist.record import ParameterRecord, record_of
from megatron_port.core.dist.state import StatePiece, StateReader
from megatron_port.core.engine.module import ScratchBuffer, logical_pieces, read_local, read_range
from megatron_port.core.optim.rules import AdamW
from megatron_port.core.optim.state_check import StateEntry, StateTensor


def flat_masters(zero: Any) -> list[torch.Tensor]:
    """The fp32 partition of each parameter group on this rank."""
    if isinstance(zero, BF16_Optimizer):
        return list(zero.fp32_groups_flat_partition)
    return list(zero.single_partition_of_fp32_groups)


def parameter_groups(zero: Any) -> list[list[torch.nn.Parameter]]:
    """The model's parameters, by group, in flattening order."""
    return list(zero.bf16_groups if isinstance(zero, BF16_Optimizer) else zero.bit16_groups)


def state_tensors(zero: Any) -> Iterator[StateTensor]:
    """Flat weights of all replicas, and this rank's partition of masters and moments; the moments exist after the first
    update."""
    flats = zero.bf16_groups_flat if isinstance(zero, BF16_Optimizer) else zero.bit16_groups_flat
    masters = flat_masters(zero)
    owned: list[list[StateEntry]] = [[] for _ in masters]
    for group, record, _, mapping in _fragments(zero):
        inside = mapping.hp_fragment_address
        owned[group].append(StateEntry(inside.start, inside.numel, record.name, mapping.lp_fragment_address.start))
    for group, (flat, parameters, master) in enumerate(zip(flats, parameter_groups(zero), masters)):
        first, size = flat.data_ptr(), flat.element_size()
        entries = [StateEntry((p.data_ptr() - first) // size, p.numel(), record_of(p).name, 0) for p in parameters]
        yield StateTensor("weight", flat.detach(), entries)
        yield StateTensor("fp32 master", master.detach(), owned[group])
        state = zero.optimizer.state.get(master, {})
        for kind in AdamW.KINDS:
            if state.get(kind) is not None:
                yield StateTensor(kind, state[kind].detach().view(-1), owned[group])


def _step_value(state: dict[str, Any]) -> int:
    return int(state.get("step", 0))


def optimizer_steps(zero: Any) -> int:
    """Updates taken so far."""
    for flat in flat_masters(zero):
        state = zero.optimizer.state.get(flat)
        if state:
            return _step_value(state)
    return 0


def _fragments(zero: Any) -> Iterator[tuple[int, ParameterRecord, torch.nn.Parameter, Any]]:
    for group, parameters in enumerate(parameter_groups(zero)):
        for p in parameters:
            if p._hp_mapping is not None:  # type: ignore[attr-defined]
                yield group, record_of(p), p, p._hp_mapping  # type: ignore[attr-defined]


def state_pieces(zero: Any, ctx: ParallelContext) -> Iterator[StatePiece]:
    """The pieces this rank owns; see ``engine.api.StatePiece``."""
    masters, replicas = flat_masters(zero), ctx.mesh.factors(*REPLICAS)
    for group, record, _, mapping in _fragments(zero):
        if not record.is_owned(ctx.mesh, ctx.rank, spread=replicas):
            continue
        inside, local = mapping.hp_fragment_address, mapping.lp_fragment_address
        state = zero.optimizer.state.get(masters[group], {})
        for kind in ("weight", *AdamW.KINDS):
            flat = masters[group] if kind == "weight" else state.get(kind)
            if flat is None:
                piece = torch.zeros(inside.numel)
            else:
                piece = flat.detach().narrow(0, inside.start, inside.numel)
            yield from logical_pieces(record, kind, piece, local.start)


@torch.no_grad()
def load_state(zero: Any, read: StateReader, steps: int) -> None:
    """Fill masters, moments and the model's weights; each rank reads its own slices, nothing is communicated."""
    masters = flat_masters(zero)
    for flat in masters:
        state = zero.optimizer.state[flat]
        # torch keeps the count as a tensor, DeepSpeed's CPUAdam as an int, its FusedAdam in the group.
        if isinstance(zero.optimizer, torch.optim.AdamW):
            state["step"] = torch.tensor(float(steps))
        else:
            state["step"] = steps
        for kind in AdamW.KINDS:
            if kind not in state:
                state[kind] = torch.zeros_like(flat)
    for group in zero.optimizer.param_groups:
        if "step" in group:
            group["step"] = steps
    scratch = ScratchBuffer(torch.float32)
    for parameters in parameter_groups(zero):
        for p in parameters:
            record, mapping = record_of(p), p._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:
                whole = scratch.get(p.shape, p.device)
                read_local(read, record, "weight", whole)
                p.copy_(whole)
                continue
            flat = masters[mapping.param_group_index]
            inside, local = mapping.hp_fragment_address, mapping.lp_fragment_address
            master = flat.narrow(0, inside.start, inside.numel)
            # Where this rank has all of it, a parameter is read to where it stays.
            whole = master.view(p.shape) if inside.numel == p.numel() else scratch.get(p.shape, p.device)
            read_local(read, record, "weight", whole)
            p.copy_(whole)
            if inside.numel != p.numel():
                master.copy_(whole.view(-1).narrow(0, local.start, local.numel))
            for kind in AdamW.KINDS:
                moment = zero.optimizer.state[flat][kind].narrow(0, inside.start, inside.numel)
                read_range(read, record, kind, moment, local.start, scratch)
    # Links that DeepSpeed made to earlier state tensors are made again at the next step.
    zero._hp_optimizer_states_linked = False
