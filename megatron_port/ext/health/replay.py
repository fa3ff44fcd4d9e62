"""A sampled micro-batch, computed again by another replica: does a device compute wrongly, silently?

Every replica computes one of its micro-batches and then the one of the replica before it, forward and backward through
all stages, from the same weights and with the same dropout. Whatever two ranks at the same place of the layout compute
from the same input must be equal to the bit, on one kind of device with deterministic kernels. A device that adds or
multiplies wrongly now and then shows here and nowhere else: its replicas receive its wrong gradients with everybody's
sum, and so all weights stay equal.
"""

from __future__ import annotations

import copy
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.data.loader import StepLoader
from megatron_port.core.dist.agree import agree, gather_names
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import REPLICAS
from megatron_port.core.dist.process import EVALUATE
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.engine.api import Engine
from megatron_port.core.errors import ConfigError, NumericsError
from megatron_port.core.train.hooks import LoopHook, LoopState, Session, every
from megatron_port.ext.health.probe import NOWHERE, Probe
from megatron_port.ext.health.replicas import BitsHash, check_replicas

_STAGES, _PLACES = 1 << 12, 1 << 24
FORWARD, GRADIENTS = 0, 1


class ReplayProbe(Probe):
    """Hashes of every module's output, of the losses and of this rank's own gradients, in the order of computation.

    They stay on the device. ``keys[i]`` tells where entry i stands among all ranks': the smallest that differs is where
    it began.
    """

    def __init__(self, digest: BitsHash, *, stage: int, stages: int) -> None:
        super().__init__(stage=stage, stages=stages)
        self._digest = digest
        self.keys: list[int] = []
        self.names: list[str] = []
        self._hashes: list[torch.Tensor] = []

    def _add(self, name: str, phase: int, place: int, value: torch.Tensor) -> None:
        self.keys.append(((phase * _STAGES) + place) * _PLACES + min(len(self.keys), _PLACES - 1))
        self.names.append(name)
        self._hashes.append(self._digest(value))

    def _hook(self, name: str) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if self._current is None:
                return  # a forward pass that recomputes, in backward
            for value in output if isinstance(output, (tuple, list)) else (output,):
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    self._add(f"the output of {name}", FORWARD, self._current[1], value)

        return hook

    def loss(self, micro_batch: int, loss_sum: torch.Tensor) -> None:
        """Hash the sum of token losses of a micro-batch (last stage)."""
        self._add("the loss", FORWARD, self.stages - 1, loss_sum.detach().float())

    def after_backward(
        self, micro_batch: int, gradients: Sequence[torch.Tensor | None], virtual: int | None = None
    ) -> None:
        """Do nothing: all gradients are hashed at the end."""

    def local_gradients(self, gradients: Sequence[tuple[ParameterRecord, torch.Tensor]]) -> None:
        """Hash this rank's gradients over all micro-batches, before any sum over ranks."""
        for record, gradient in reversed(list(gradients)):  # backward begins at the last stage and layer
            self._add(f"the gradient of {record.name}", GRADIENTS, self.stages - 1 - self.stage, gradient)

    def hashes(self) -> torch.Tensor:
        """Return int64 [entries] on the device."""
        return torch.stack(self._hashes)


def check_replay_settings(config: RunConfig, session: Session) -> None:
    """Refuse a replay whose bits may differ on sound devices. Raises ConfigError; the same on every rank."""
    if not config.numerics.replay_interval:
        return
    if session.device.is_gpu and not config.backend.deterministic:
        raise ConfigError([
            f"numerics.replay_interval is {config.numerics.replay_interval}: on GPUs it needs backend.deterministic = "
            "true, or kernels may add in another order each time and sound devices would be blamed; set it, or 0"
        ])
    attention = next((row.provider for row in session.providers.table if row.op == "attention"), "")
    if config.model.attention_dropout and attention not in ("own", "math"):
        raise ConfigError([
            f"numerics.replay_interval is {config.numerics.replay_interval} with model.attention_dropout: attention "
            f'provider "{attention}" draws other masks on another rank; use backend.attention = "math", or 0'
        ])


def replay_on_neighbour(
    engine: Engine, session: Session, loader: StepLoader, *, first_sample: int, step: int
) -> None:
    """Compute a micro-batch twice, by its own replica and by the next; see the module. Collective.

    With one replica the same ranks compute it twice, which shows faults that come and go. Costs two micro-batches'
    forward and backward passes without overlap (as many as stages where a schedule interleaves chunks), two reductions
    of the gradients, and a check of the replicas' weights.

    Args:
        first_sample: of a step, by position in the data's order; its first micro-batches are taken.
        step: optimizer steps done, for the message.

    Raises:
        NumericsError: on every rank alike; names rank, host and module where the results first differ.
    """
    ctx = session.ctx
    check_replicas(engine, ctx, step=step)  # or else it is the weights that differ
    digest = BitsHash(ctx.device)
    dp, own = ctx.size("dp"), ctx.index("dp")
    count = 1 if session.config.layout.virtual_pipeline_size == 1 else ctx.topology.pp
    probes = []
    for replica in (own, (own - 1) % dp):
        source = copy.copy(loader)
        source.dp_rank = replica
        batches = source.step(first_sample, count * loader.micro_batch_size * dp)
        probes.append(_compute(engine, ctx, digest, batches, step))
    mine, again = probes[0].hashes(), probes[1].hashes()
    found = _first_difference(ctx, digest, mine, again)
    least = torch.tensor([NOWHERE if found is None else probes[0].keys[found[0]]])
    key = int(least)
    if session.info.world_size > 1:
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=session.cpu_group)
    error = None
    if found is not None and key == int(least):
        error = _explain(ctx, probes[0].names[found[0]], found[1], first_sample, step)
    agree(error, where=str(ctx.coords), group=session.cpu_group)


def _compute(
    engine: Engine, ctx: ParallelContext, digest: BitsHash, batches: Sequence[MicroBatch], step: int
) -> ReplayProbe:
    probe = ReplayProbe(digest, stage=ctx.coords.pp, stages=ctx.topology.virtual_stages)
    engine.train_step(batches, step=step, lr=0.0, probe=probe)
    return probe


def _first_difference(
    ctx: ParallelContext, digest: BitsHash, mine: torch.Tensor, again: torch.Tensor
) -> tuple[int, list[int]] | None:
    """Return (entry, suspects by their positions in the group) of the first result that two replicas disagree on; equal
    in a group of replicas.

    Replica k's results are ``mine`` on k and ``again`` on k + 1, and of the ranks that share the positions of its
    sequences each compares with the one at its place. Where all agree, 16 bytes per rank are exchanged.
    """
    dp, cp = ctx.size("dp"), ctx.size("cp")
    if dp == 1:
        differs = (mine != again).nonzero().flatten().tolist()
        return (differs[0], [0]) if differs else None
    pairs = torch.stack(_gathered(ctx, torch.stack([digest(mine), digest(again)]))).tolist()
    behind = {r: (r + cp) % (dp * cp) for r in range(dp * cp)}  # who computed rank r's part again
    if all(pairs[r][0] == pairs[other][1] for r, other in behind.items()):
        return None
    table = _gathered(ctx, torch.stack([mine, again]))
    first: dict[int, int] = {}
    for r, other in behind.items():
        differs = (table[r][0] != table[other][1]).nonzero().flatten().tolist()
        if differs:
            first[r] = differs[0]
    entry = min(first.values())
    # Who is in more of the disagreements that begin there is at fault; two replicas cannot tell.
    votes = Counter(rank for r, at in first.items() if at == entry for rank in {r, behind[r]})
    most = max(votes.values())
    return entry, sorted(r for r, n in votes.items() if n == most)


def _gathered(ctx: ParallelContext, mine: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensor of each rank that holds a replica of this one's weights; collective over them."""
    parts = [torch.empty_like(mine) for _ in range(ctx.size(*REPLICAS))]
    dist.all_gather(parts, mine, group=ctx.over(*REPLICAS))
    return parts


def _explain(ctx: ParallelContext, what: str, suspects: Sequence[int], first_sample: int, step: int) -> NumericsError:
    """Return the error that names the suspects. Collective over the replicas."""
    members, hosts, alone = [ctx.rank], ["this host"], ctx.size("dp") == 1
    group = ctx.over(*REPLICAS)
    if group is not None and not alone:
        members = dist.get_process_group_ranks(group)
        hosts = gather_names(socket.gethostname(), group=group, device=ctx.device)
    named = [f"rank {members[r]} on {hosts[r]}" for r in suspects]
    verdict = f"{named[0]} computes wrongly" if len(named) == 1 else f"{' or '.join(named[:4])} computes wrongly"
    beside = [name for axis, name in (("tp", "tensor"), ("cp", "context")) if ctx.size(axis) > 1]
    if beside:
        verdict += f", or another rank of its {'- or '.join(beside)}-parallel group"
    how = "the same ranks computed it twice" if alone else "another replica computed it again"
    return NumericsError(
        f"replay of samples from {first_sample} after step {step}: {what} came out with other bits when {how}: "
        f"{verdict}. Weights and samples were the same: suspect the device (`megatron-port preflight node`), leave the "
        "host out, and resume from a checkpoint that is older than the last replay that passed"
    )


class ReplayCheck(LoopHook):
    """Compute a micro-batch on another replica too, every ``numerics.replay_interval`` steps.

    Raises:
        ConfigError: sound devices may give other bits with these settings.
    """

    def __init__(self, state: LoopState) -> None:
        super().__init__(state)
        check_replay_settings(state.config, state.session)

    def due(self, step: int) -> bool:
        """Return whether an interval ends."""
        return every(self.state.config.numerics.replay_interval, step)

    def act(self) -> None:
        """Compute a micro-batch of the last step again. Raises NumericsError on every rank where results differ."""
        state = self.state
        first, _ = state.batches.step_plan(state.progress.step - 1)
        with state.session.progress.enter(EVALUATE, "replay on another replica"):
            replay_on_neighbour(
                state.engine, state.session, state.loaders.train, first_sample=state.numerics.position(first),
                step=state.progress.step,
            )
