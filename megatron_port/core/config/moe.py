"""Tables ``[model.moe]`` and ``[moe]``: layers of many experts, and what a run does with their routes."""

from __future__ import annotations

import fractions
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

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
    from megatron_port.core.config.schema import ModelConfig

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
