"""How programs store gradients and optimizer, what they send and what they hide; this program's two engines.

What programs of others do besides hangs on the methods of :class:`Engine`: ``benchmarks/programs.py`` describes some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from megatron_port.core.config.optimizer import OptimizerConfig
from megatron_port.core.config.schema import ModelConfig

if TYPE_CHECKING:
    from megatron_port.core.dist.record import ParameterRecord
    from megatron_port.core.model.spec import LayerSpec
    from megatron_port.core.optim.rules import OptimizerRule
    from megatron_port.ext.experts.spec import MoESpec
    from megatron_port.tools.plan.case import Case
    from megatron_port.tools.plan.chunk import ChunkBytes
    from megatron_port.tools.plan.exchanges import HeadBytes
    from megatron_port.tools.plan.rates import Cost, Links, Rates, Span


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How a program stores gradients and optimizer, what it sends and what it hides behind compute."""

    name: str
    gradient_bytes: int = 4
    """Held for every parameter until the step's end: fp32 sums (4) or the dtype's own gradients (2)."""
    accumulate_traffic: int = 10
    """Bytes moved for each parameter and micro-batch to add its gradient: write 2, read 2 + 4, write 4, or fused 8."""
    reduce_bytes: int = 4
    """Sent for each gradient when replicas are summed."""
    shard_reduces: bool = False
    """Replicas reduce-scatter (each keeps its share) instead of all-reducing, where the optimizer is split."""
    reduce_overlap: float = 0.0
    """Share of a stage's last backward behind which gradient traffic hides (0 or 1)."""
    gather_overlap: float = 0.0
    """Share of the first forward behind which the all-gather of weights hides (0 or 1)."""
    transfer_overlap: bool = False
    """Sends between stages hide behind compute (interleaved schedules with asynchronous transfers)."""
    duplex_transfers: bool = True
    """A stage sends and receives at the same time; DeepSpeed's instructions do one after the other."""
    tensor_overlap: str = "none"
    """none | backward (the gradient's all-reduce beside the weight gradient) | tiled (pieces of a product)"""
    bucket_bytes: float = 200e6
    """Buffers that gradient reduction and weight gathering hold."""
    update_copy_bytes: int = 0
    """Held for each parameter of the rank's share only while the optimizer steps."""
    update_extra_bytes: int = 8
    """Moved for each parameter of the rank's share beside Adam's own: unscale, clip, copies between precisions."""
    fused_update: bool = False
    """With own kernels the update unscales, clips and rounds too, and sums of gradients are not cleared."""
    expert_overlap: str = "none"
    """All-to-all of tokens: none | shared (one of a layer's two beside the block that every token passes) | passes
    (beside the passes of another micro-batch: DualPipe)"""
    attention: str = "flash2"
    """Whose fused attention, where the cluster's table knows it: flash2 | flash3 | cudnn."""
    graphed: bool = False
    """A step's launches are replayed from a graph: the host starts none of them."""

    # What only programs of others do: each method here is one in which they do nothing else than these engines.

    @property
    def copies_logits(self) -> bool:
        """Whether the loss keeps an fp32 copy of the logits."""
        return False

    @property
    def weighs_activation(self) -> bool:
        """Whether the router's weights multiply the experts' activation: what experts return is not kept for them."""
        return False

    @property
    def cast_bytes(self) -> float:
        """Bytes per element moved to cast an operand of experts to 8 bits."""
        return 4.0

    def drops(self, output: str) -> bool:
        """Whether an output (layernorm, moe_act, mla_up_proj) is dropped and made again in the backward pass."""
        return False

    def again(self, case: Case, layer: LayerSpec, rates: Rates) -> float:
        """Seconds in which a layer's dropped outputs are made again."""
        return 0.0

    def exchange_again(self, forward: float, backward: float) -> float:
        """Seconds of a recomputed pass's exchange, of those of the first, with the numbers of rows, and of the backward
        pass, of rows alone: this engine's exchanges the numbers that the first has found."""
        return backward

    def casts(
        self, case: Case, rates: Rates, products: Sequence[tuple[float, float, float]]
    ) -> tuple[float, float]:
        """Seconds of a layer's 8-bit casts, forward and backward, where ``precision.fp8`` names no recipe."""
        return 0.0, 0.0

    def add_passes(
        self, case: Case, layer: LayerSpec, forward: dict[str, float], backward: dict[str, float]
    ) -> None:
        """Change the bytes of a layer's passes over memory, by name."""

    def calls(self, linears: float, experts: float = 0.0) -> float:
        """Return the operations of the host for linear layers, and for a grouped product of so many experts."""
        return linears

    def block_attention(
        self, case: Case, own: HeadBytes, rates: Rates, links: Links, core: tuple[float, float]
    ) -> Cost | None:
        """The exchange of gathered keys and values whose attention runs block by block; None: one kernel over all."""
        return None

    def sent_outside(self, case: Case, moe: MoESpec, group: Span, busiest: float) -> float:
        """Return the bytes, out of ``busiest``, that leave a node in an all-to-all of rows; 0: as the group lies."""
        return 0.0

    def message(self, case: Case, links: Links, size: float) -> tuple[float, float]:
        """Return the bytes of an activation of ``size`` that a rank sends to the next stage, and seconds on top."""
        return size, 0.0

    def buffers(self, replicas: int, elements: int, sums: float) -> float:
        """Bytes of a rank's buffers for so many parameters; ``sums``: of those of sharded gradients."""
        return (min(self.bucket_bytes, elements * 6.0) if replicas > 1 else 0.0) + sums

    def moment_bytes(self, wide: int) -> int:
        """Bytes of a moment of the optimizer, ``wide`` being full width."""
        return wide

    def chunk(self, case: Case, found: ChunkBytes, layers: int) -> ChunkBytes:
        """Return the bytes of a chunk of so many layers as the program holds them."""
        return found

    def window(self, case: Case, stage: int, layers: int) -> int:
        """Elements gathered at once under ZeRO-3; ``layers``: of two whole layers and the ends."""
        return layers

    def late_gathers(self, case: Case) -> tuple[float, int]:
        """Share of the weights (ZeRO-3) that no earlier one is used beside their gathering, and how often a backward
        pass gathers."""
        return 0.0, 1

    def gathers(self, layer: LayerSpec) -> int:
        """Collectives in which a layer's weights are gathered under ZeRO-3."""
        return 1


ENGINES = {
    # ext/deepspeed/deepspeed_engine.py: fp32 accumulation, fp32 all-reduce, no overlap under a pipeline.
    "deepspeed": Engine(
        name="deepspeed", accumulate_traffic=12, duplex_transfers=False, tensor_overlap="backward",
        bucket_bytes=50e6 * 4 + 500e6 * 2, update_copy_bytes=4,
        update_extra_bytes=22,  # flattened and cast (4 + 4), unscaled and clipped (4 + 4), written back (4 + 2)
    ),
    # core/engine/native.py: the weight gradient goes straight into the fp32 sum; core/optim/sharded.py: reduced and
    # gathered in place, beside the passes; core/pipeline/runner.py: sends and receives are started ahead.
    "native": Engine(
        name="native", accumulate_traffic=8, bucket_bytes=0.0, shard_reduces=True, reduce_overlap=1.0,
        gather_overlap=1.0, transfer_overlap=True, tensor_overlap="backward",
        expert_overlap="shared", fused_update=True,
    ),
}
"""The engines of this program, by the name in the run file."""


# State, operations and traffic of an optimizer rule for the whole model (``plan.step``: on one rank).
#
# AdamW's two moments are known. Another rule is imported, and torch with it, and asked about the model's records. Its
# state is counted in the mean over the model; a rank with Muon's tables, which have AdamW's moments, has a little more.

@dataclass(frozen=True)
class RuleCost:
    """A rule and the model's elements, unsplit."""

    name: str = "adamw"
    state: float = 2.0
    """Tensors of optimizer state for each parameter, as wide as its master, masters left out, in the mean."""
    matrices: int = 0
    """Elements of the matrices that come together on owners."""
    products: float = 0.0
    """Operations on them."""
    sums: int = 0
    """Values of rows and columns."""


ADAMW = RuleCost()


def rule_cost(optimizer: OptimizerConfig, model: ModelConfig) -> RuleCost:
    """Return what a rule costs for a model.

    Raises:
        ConfigError: a plugin's rule cannot be imported, or is none.
    """
    if optimizer.name == "adamw":
        return replace(ADAMW, state=3.0) if optimizer.ema_decay else ADAMW
    from megatron_port.core.optim.rules import rule_of

    return _cost(rule_of(optimizer), optimizer, model)


def state_bytes(rule: OptimizerRule, record: ParameterRecord, wide: int = 4) -> float:
    """Return the bytes of state for each element of a parameter, by logical shapes."""
    total = sum(prod(k.shape(record)) * (wide if k.dtype is None else k.dtype.itemsize) for k in rule.state(record))
    return total / max(record.numel, 1)


@lru_cache(maxsize=64)
def _cost(rule: OptimizerRule, optimizer: OptimizerConfig, model: ModelConfig) -> RuleCost:
    from megatron_port.core.model.shapes import model_records
    from megatron_port.ext.rules.matrices import MatrixRule, shapes_of

    records = list(model_records(model).values())
    total = sum(r.numel for r in records)
    mean = sum(state_bytes(rule, r, wide=4) * r.numel for r in records) / (4 * total)
    sums = sum(prod(k.shape(r)) for r in records for k in rule.state(r) if not k.divided)
    formula = rule.formula
    taken = [r for r in records if isinstance(formula, MatrixRule) and formula.takes(r)]
    products = 0.0
    for r in taken:
        for rows, columns in shapes_of(r):
            small, large = sorted((rows, columns))
            # Of each iteration: a product with the transpose, that one's square, and both with the matrix.
            products += prod(r.shape[:-2]) * optimizer.muon.ns_steps * (4.0 * small * small * large + 2.0 * small**3)
    return RuleCost(optimizer.name, mean, sum(r.numel for r in taken), products, sums)
