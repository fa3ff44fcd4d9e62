"""What layers of experts do not go with, and how many ranks may divide experts."""

from __future__ import annotations

from megatron_port.core.config.conflicts import Above, Conflict, Rule, Table
from megatron_port.core.config.layout import either, expert_cuts, nearest
from megatron_port.core.config.schema import LayoutConfig, RunConfig

DEEPEP_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Numbers of ranks for which DeepEP's high-throughput kernels have settings."""


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
    Conflict("backend.graphs", "each layer waits for the numbers of tokens that ranks exchange, which a graph "
             "cannot", 'use "off"', refused=("step",)),
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


def divided_experts(layout: LayoutConfig, replicas: int) -> list[str]:
    """Name an ``expert_parallel_size`` by which experts cannot be divided over the ranks of a stage: each
    boundary of one division must divide the next of the other (``dist.mesh``)."""
    ep, tp, cp = layout.expert_parallel_size, layout.tensor_parallel_size, layout.context_parallel_size
    cuts, legal = expert_cuts(tp, cp, replicas, layout.shard_size)
    if ep in legal:
        return []
    return [
        f"layout.expert_parallel_size {ep} must divide, or be a multiple of, each of {', '.join(map(str, cuts))} (tp, "
        "tp x cp, with the replicas of a shard, with all of them) and at most the last; use "
        f"{either(nearest(ep, legal))}"
    ]
