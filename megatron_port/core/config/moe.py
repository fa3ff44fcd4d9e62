"""Tables ``[model.moe]`` and ``[moe]``: layers of many experts, and what a run does with their routes."""

from __future__ import annotations

import fractions
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from megatron_port.core.config.conflicts import Above, Conflict, Rule, Table
from megatron_port.core.config.ranges import (
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    PathSetting,
    Positive,
    Ratio,
    Size,
    SizeOrZero,
)

if TYPE_CHECKING:
    from megatron_port.core.config.schema import ModelConfig, RunConfig

DEEPEP_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Numbers of ranks for which DeepEP's high-throughput kernels have settings."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Layers whose feed-forward block is many experts, each token being sent to a few (docs/moe.md). A group, over
    which capacity and balance are counted, is one sample: so neither depends on the layout."""

    num_experts: SizeOrZero = 0
    """Experts of a layer, E; 0: all layers are dense."""
    top_k: Size = 2
    """Experts that each token is sent to, k."""
    ffn_hidden_size: SizeOrZero = 0
    """Width of an expert; 0: that of the dense layers."""
    shared_ffn_hidden_size: SizeOrZero = 0
    """Width of a block that every token passes in addition to its experts (DeepSeek: shared experts x their width); 0:
    none."""
    shared_gate: bool = False
    """Multiply the shared block by the sigmoid of a product of the token with a learned row (Qwen2-MoE)."""
    first_dense: CountOrZero = 0
    """Layers at the beginning that have no experts (DeepSeek-V3: 3)."""
    every: Count = 1
    """Every n-th of the layers after those has experts (Switch, GShard: 2)."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Score of an expert from its logit: over all experts (softmax), or each separately (sigmoid, DeepSeek-V3). Always
    float32 or wider."""
    normalize: bool = True
    """Divide the scores of a token's experts by their sum (Mixtral, Qwen3, DeepSeek-V3; not Switch, OLMoE)."""
    scale: Positive = 1.0
    """Factor on the experts' output (DeepSeek-V3: 2.5)."""
    groups: Size = 1
    """Runs of experts, on one node each; a token may go to top_groups of them (DeepSeek-V3: 8)."""
    top_groups: Size = 1
    """Groups that a token's experts are chosen from (DeepSeek-V3: 4)."""
    group_score: Literal["max", "top2"] = "top2"
    """Score of a group: its best expert's (DeepSeek-V2), or the sum of its two best (DeepSeek-V3)."""
    router_bias: bool = False
    """A learned bias of each expert's logit (GPT-OSS)."""
    jitter: Fraction = 0.0
    """While training, the router reads its input times a number drawn from 1 - jitter to 1 + jitter (Switch: 0.01)."""
    second_expert: Literal["top", "random"] = "top"
    """random: the second of two experts is used with a probability of twice its weight (GShard)."""
    capacity_factor: NonNegative = 0.0
    """An expert takes at most this x k x seq_length / E tokens of a sample, and the others skip it; 0: no limit.
    Generation does not apply it, because it does not know the sample."""
    drop_by: Literal["position", "probability"] = "position"
    """Tokens that an expert at its capacity keeps: the first ones (Switch), or those with the highest scores."""
    balance_loss: Literal["none", "sequence", "previous_step"] = "none"
    """none | sequence (of each sample by itself; Switch's loss, DeepSeek-V3's sequence-wise one) | previous_step (the
    shares of experts are those of the last step's global batch)"""
    balance_weight: NonNegative = 0.01
    """Factor of the balance loss."""
    z_weight: NonNegative = 0.0
    """Factor of the mean square of the logits' log-sum-exp (ST-MoE: 0.001)."""
    balance_bias: bool = False
    """A bias that only chooses experts, raised for those below the mean load of a step and lowered for those above
    (DeepSeek-V3, arXiv 2408.15664)."""
    bias_rate: NonNegative = 0.001
    """Change of that bias in a step."""

    @property
    def enabled(self) -> bool:
        """Whether any layer has experts."""
        return self.num_experts > 0

    @property
    def drops(self) -> bool:
        """Whether a token may lose an expert that it chose."""
        return self.capacity_factor > 0 or self.second_expert == "random"

    def has_experts(self, layer: int) -> bool:
        """Return whether layer ``layer`` (from 0) has experts."""
        return self.enabled and layer >= self.first_dense and (layer - self.first_dense + 1) % self.every == 0

    def capacity(self, seq_length: int) -> int:
        """Return the tokens of a sample that an expert takes; 0: all of them."""
        if not self.capacity_factor:
            return 0
        written = fractions.Fraction(repr(self.capacity_factor))  # 1.15 itself: the binary number is below it
        return max(1, int(written * self.top_k * seq_length / self.num_experts))


def experts_of(model: ModelConfig) -> dict[str, Any]:
    """Return ``moe`` and ``ffn_hidden_size`` with sizes filled in, and fields without effect at their defaults."""
    moe, plain = model.moe, MoEConfig()
    if not moe.enabled:
        return {"moe": plain, "ffn_hidden_size": model.ffn_size}
    unused = ("top_groups", "group_score") if moe.groups == 1 else ()
    moe = replace(moe, ffn_hidden_size=model.expert_size, **{name: getattr(plain, name) for name in unused})
    dense = not all(moe.has_experts(layer) for layer in range(model.num_layers))
    return {"moe": moe, "ffn_hidden_size": model.ffn_size if dense else model.expert_size}


@dataclass(frozen=True, kw_only=True)
class RoutesConfig:
    """Log and replay of the routes of a run's tokens; changes no number, except that replay fixes them."""

    routes: Literal["none", "log"] = "none"
    """none | log (write the experts of each token of each layer and step to the run's folder)"""
    replay: PathSetting = ""
    """Folder of logged routes that the router follows instead of its own choice; empty: none."""
    starved_share: Fraction = 0.1
    """An expert starves if it gets less than this share of the mean load of its layer's experts."""
    starved_steps: CountOrZero = 100
    """Steps in a row after which a starving expert is named in a warning; 0: never."""
    imbalance: Ratio = 1.8
    """Only for plans: rows of the busiest expert-parallel rank in a layer, over the mean. 1: balance is forced. Four
    published pairs, with and without forced balance, give the default (benchmarks/evidence/planner-accuracy.md)."""


def _scored_groups(config: RunConfig) -> list[str]:
    """Name groups of experts that do not divide them, or leave a token too few."""
    moe = config.model.moe
    experts, k = moe.num_experts, moe.top_k
    if experts % moe.groups:
        return [f"model.moe.groups {moe.groups} does not divide num_experts {experts}"]
    if moe.top_groups > moe.groups:
        return [f"model.moe.top_groups {moe.top_groups} is above groups {moe.groups}"]
    if k > moe.top_groups * (experts // moe.groups):
        return [f"model.moe.top_k {k} experts do not fit into top_groups {moe.top_groups} of {experts // moe.groups} "
                f"experts each; use top_groups {-(-k * moe.groups // experts)}"]
    return []


def _replayed(config: RunConfig) -> list[str]:
    """Name a replay on a replica that has other experts."""
    layout, interval = config.layout, config.numerics.replay_interval
    ep, tp, cp = layout.expert_parallel_size, layout.tensor_parallel_size, layout.context_parallel_size
    return [
        f"numerics.replay_interval {interval} with layout.expert_parallel_size {ep}: another replica has other "
        "experts, and computes with other tokens' rows; use an expert_parallel_size of at most tensor_parallel_size "
        f"{tp}{f' x context_parallel_size {cp}' if cp > 1 else ''}, or replay_interval 0"
    ] if ep > tp * cp and interval else []


_ROUTER = (
    Above("model.moe.top_k", "model.moe.num_experts"),
    Rule(lambda c: c.model.moe.top_k == 1 and c.model.moe.normalize,
         "model.moe.top_k 1 with normalize = true: the only weight would be 1 whatever the router says, and the "
         "router would learn nothing; use normalize = false"),
    Rule(lambda c: c.model.moe.groups > 1 and c.model.moe.group_score == "top2"
         and c.model.moe.num_experts // c.model.moe.groups < 2,
         'model.moe.group_score "top2" needs groups of at least 2 experts; use "max"'),
    Rule(lambda c: c.model.moe.second_expert == "random" and (c.model.moe.top_k != 2 or not c.model.moe.normalize),
         'model.moe.second_expert "random" needs top_k 2 and normalize = true; top_k is {c.model.moe.top_k}'),
    Rule(lambda c: c.model.moe.shared_gate and not c.model.moe.shared_ffn_hidden_size,
         "model.moe.shared_gate needs a shared block; set shared_ffn_hidden_size"),
    Rule(lambda c: c.model.num_layers < c.model.moe.first_dense + c.model.moe.every,
         "model.moe: none of num_layers {c.model.num_layers} has experts with first_dense {c.model.moe.first_dense} "
         "and every {c.model.moe.every}; lower them, or set num_experts = 0"),
)
_RUN = (
    Rule(lambda c: c.model.moe.num_experts % c.layout.expert_parallel_size,
         "layout.expert_parallel_size {c.layout.expert_parallel_size} does not divide {asked}"),
    Rule(lambda c: c.model.seq_length % c.layout.tensor_parallel_size,
         "model.seq_length {c.model.seq_length} does not divide by tensor_parallel_size "
         "{c.layout.tensor_parallel_size}: in layers of experts each tensor-parallel rank sends its own share of the "
         "tokens"),
    Conflict("precision.fp8", "which is not built for layers of experts", 'use "none"', allowed=("none",)),
    Conflict("backend.graphs", "each layer waits for the numbers of tokens that ranks exchange, which a recording "
             "cannot", 'use "off"', allowed=("off",)),
    Conflict("activations.policy", "which knows no layers of experts", "use none, selective or full",
             refused=("plan", "profile")),
)
_EXCHANGE = (
    Conflict("engine", "which runs experts on every replica", 'use 1, or engine = "native"', refused=("deepspeed",),
             when=lambda c: c.layout.expert_parallel_size > 1),
    Conflict("backend.experts_exchange", "nothing is exchanged", 'use "torch"', allowed=("torch",),
             when=lambda c: c.layout.expert_parallel_size == 1),
    Conflict("backend.experts_exchange", f"it has settings for {', '.join(map(str, DEEPEP_SIZES))} ranks",
             'use one of those, or "torch"', refused=("deepep",),
             when=lambda c: c.layout.expert_parallel_size not in (1, *DEEPEP_SIZES)),
)
CONFLICTS = (
    Table(on=lambda c: not c.model.moe.enabled, sized=True, rows=(
        Rule(lambda c: c.layout.expert_parallel_size != 1 and not c.distillation.online,  # the teacher may have some
             "layout.expert_parallel_size {c.layout.expert_parallel_size} with model.moe.num_experts 0: no layer has "
             "experts to divide; use 1"),
        Rule(lambda c: c.moe.routes != "none", "moe.routes needs a model with experts (model.moe.num_experts)"),
        Rule(lambda c: c.moe.replay, "moe.replay needs a model with experts (model.moe.num_experts)"),
    )),
    Table(asked="model.moe.num_experts {c.model.moe.num_experts}", on=lambda c: c.model.moe.enabled, sized=True,
          rows=(*_ROUTER, *_RUN), more=(_scored_groups, _replayed)),
    Table(asked="layout.expert_parallel_size {c.layout.expert_parallel_size}", on=lambda c: c.model.moe.enabled,
          sized=True, rows=_EXCHANGE),
    Table(asked='model.moe.balance_loss "previous_step"', sized=True,
          on=lambda c: c.model.moe.enabled and c.model.moe.balance_loss == "previous_step", rows=(
        Conflict("fine_tuning.method", "its shares change from step to step, and a checkpoint of adapters holds "
                 "nothing but those", 'use "sequence" or "none"', allowed=("none",)),
    )),
)
