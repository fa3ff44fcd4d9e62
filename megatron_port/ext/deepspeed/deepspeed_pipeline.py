"""DeepSpeed's pipeline engine, with the parts overridden that are wrong or unaware of our parameter records.

Checked against DeepSpeed 0.19.8, the version that is pinned; everything that
touches its insides is here and in ``deepspeed_state``.

* The dispatch table holds unbound functions, so overriding a method is not
  enough: the table is rebuilt below.
* Tied gradients are looked up where they are (``grad``, ``grad_accum`` or the
  bf16 optimizer's buffer); DeepSpeed reads ``weight.grad``, which is None with
  fp16 and fp32 accumulation, and then never sums them.
* Gradients that are partial over tp are summed before ZeRO's reduction.
* fp16: DeepSpeed changes the loss scale before it divides the gradient by it,
  so the step at which the scale grows is halved. The scale is changed after
  the step here, by the same ``LossScaler`` that the native engine uses.
* The loss is not divided by the number of micro-batches: the engine that owns this one divides by tokens.
* Its optimizers know one reason to skip an update, a norm that is not finite.
  The torch optimizer inside, which they call once norm and clipping are done,
  is asked by ``skip_step_when`` whether it may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS
from megatron_port.core.dist.process import BACKWARD, DATA, FORWARD, OPTIMIZER, REDUCE, TRANSFER, ProgressTracker
from megatron_port.core.dist.record import ParameterRecord, StatePiece, StateReader, record_of
from megatron_port.core.engine.module import ScratchBuffer, logical_pieces, read_local, read_range
from megatron_port.core.optim.rules import AdamW
from megatron_port.core.optim.state_watch import StateEntry, StateTensor


def skip_step_when(inner: torch.optim.Optimizer, skipped: Callable[[], bool]) -> None:
    """Let ``inner.step`` do nothing where ``skipped()``. Its owner then publishes and gathers weights that are as
    they were, and clears gradients as after any step."""
    real = inner.step

    def step(*args: Any, **kwargs: Any) -> Any:
        return None if skipped() else real(*args, **kwargs)

    inner.step = step  # type: ignore[method-assign]


class SingleStagePipelineModule(PipelineModule):  # type: ignore[misc] # DeepSpeed has no types
    """A PipelineModule whose layer i is our stage i: how layers are split is decided in one place, not here."""

    def __init__(self, stage: nn.Module, ctx: ParallelContext, loss_fn: Callable[..., torch.Tensor]) -> None:
        t = ctx.topology

        def build() -> nn.Module:
            return stage

        with torch.no_grad():
            super().__init__(
                layers=[LayerSpec(_ModuleHolder, build) for _ in range(t.pp)],
                topology=PipeModelDataParallelTopology(num_pp=t.pp, num_mp=t.tp, num_dp=t.dp * t.cp),
                loss_fn=loss_fn,
                partition_method="uniform",
                activation_checkpoint_interval=0,
            )
        for p in self.parameters():
            record = record_of(p)
            # Its norm counts a parameter on every tp rank if split, on tp rank 0 otherwise, and never if "replicated".
            split = record.split_dim is not None
            p.tensor_model_parallel = split
            owned = record.is_owned(ctx.mesh, ctx.rank, zero_dims=ctx.mesh.dims(*REPLICAS))
            p.ds_pipe_replicated = (split and not owned) or not record.tied_primary


class _ModuleHolder(nn.Module):
    """Holder of an existing stage: LayerSpec builds modules by class."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stage = build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.stage(x)
        return out


PHASES: dict[type, tuple[str, str]] = {
    schedule.LoadMicroBatch: (DATA, "micro-batch in buffer"),
    schedule.ForwardPass: (FORWARD, "micro-batch in buffer"),
    schedule.BackwardPass: (BACKWARD, "micro-batch in buffer"),
    schedule.SendActivation: (TRANSFER, "send an activation"),
    schedule.RecvActivation: (TRANSFER, "receive an activation"),
    schedule.SendGrad: (TRANSFER, "send a gradient"),
    schedule.RecvGrad: (TRANSFER, "receive a gradient"),
    schedule.ReduceGrads: (REDUCE, "gradients over dp"),
    schedule.ReduceTiedGrads: (REDUCE, "tied and partial gradients"),
    schedule.OptimizerStep: (OPTIMIZER, "gradient norm and update"),
}
"""Instruction → phase and operation that the progress tells."""


def _in_phase(phase: str, operation: str, execute: Callable[..., None]) -> Callable[..., None]:
    """Wrap an instruction so that it first reports its phase."""

    def instruction(self: RecordedPipelineEngine, *args: Any, **kwargs: Any) -> None:
        self.progress.at(phase, operation, kwargs.get("buffer_id", -1))
        execute(self, *args, **kwargs)

    return instruction


class RecordedPipelineEngine(PipelineEngine):  # type: ignore[misc] # DeepSpeed has no types
    """Calls back around each pass, around gradient reduction and before the update."""

    progress: ProgressTracker
    around_forward: Callable[[int], AbstractContextManager[None]]
    reduce_shared_gradients: Callable[[list[tuple[ParameterRecord, torch.Tensor]]], None]
    before_update: Callable[[], None]
    after_backward: Callable[[int, torch.Tensor | None], None]
    """Called with the micro-batch and the gradient that goes to the stage before."""
    in_backward = False

    def held_gradients(self) -> list[torch.Tensor | None]:
        """Return what each parameter has accumulated so far, where that is known."""
        if isinstance(self.optimizer, BF16_Optimizer):
            return [getattr(p, "_hp_grad", None) for p in self.module.parameters()]
        return [self.optimizer.get_param_gradient_attribute(p) for p in self.module.parameters()]

    def recorded_gradients(self) -> list[tuple[ParameterRecord, torch.Tensor]]:
        """(record, accumulated gradient) of every parameter, in the buffer that ZeRO will reduce."""
        out = []
        for p in self.module.parameters():
            if isinstance(self.optimizer, BF16_Optimizer):
                grad = getattr(p, "_hp_grad", None)
            else:
                grad = self.optimizer.get_param_gradient_attribute(p)
            if grad is None:
                raise RuntimeError(f"{record_of(p).name} received no gradient in this step")
            out.append((record_of(p), grad))
        return out

    def _exec_forward_pass(self, buffer_id: int) -> None:
        with self.around_forward(self.forward_count):
            self.forward_count += 1
            super()._exec_forward_pass(buffer_id)

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step; 1 during a backward pass, where DeepSpeed divides the loss by it."""
        return 1 if self.in_backward else int(super().gradient_accumulation_steps())

    def _exec_backward_pass(self, buffer_id: int) -> None:
        self.in_backward = True
        try:
            super()._exec_backward_pass(buffer_id)
        finally:
            self.in_backward = False
        received = None if self.is_first_stage() else self.pipe_buffers["inputs"][buffer_id]
        self.after_backward(self.backward_count, getattr(received, "grad", None))
        self.backward_count += 1

    def _exec_reduce_tied_grads(self) -> None:
        self.reduce_shared_gradients(self.recorded_gradients())

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        self.before_update()
        super()._exec_optimizer_step(lr_kwargs)

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        self.forward_count = self.backward_count = 0
        super()._exec_schedule(pipe_schedule)

    def _aggregate_total_loss(self) -> torch.Tensor:
        """Do nothing: the loss is summed once, over tokens, by the engine that owns this one."""
        return torch.zeros((), device=self.device)

    _INSTRUCTION_MAP = {  # noqa: RUF012
        instruction: _in_phase(*PHASES[instruction], execute) if instruction in PHASES else execute
        for instruction, execute in {
            **PipelineEngine._INSTRUCTION_MAP,
            schedule.ForwardPass: _exec_forward_pass,
            schedule.BackwardPass: _exec_backward_pass,
            schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
            schedule.OptimizerStep: _exec_optimizer_step,
        }.items()
    }


# DeepSpeed's ZeRO-1 state by canonical name: each rank's shard_ranges, without communication.
#
# ZeRO-1 flattens a parameter group and gives each replica a contiguous range of
# it, so a rank owns a contiguous range of some parameters' flattened local
# slices. The engine's own mapping (``_hp_mapping``) says which.

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
    masters, replicas = flat_masters(zero), ctx.mesh.dims(*REPLICAS)
    for group, record, _, mapping in _fragments(zero):
        if not record.is_owned(ctx.mesh, ctx.rank, zero_dims=replicas):
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
