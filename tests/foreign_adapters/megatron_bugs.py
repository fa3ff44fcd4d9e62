"""Megatron-core with a bug of its own kind planted, by option ``bug``; the reference has none.

Numbers are findings of NVIDIA/Megatron-LM#7452. Findings 8 and 9 need no planting: 0.16.1 has them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_model
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.transformer.moe import router
from torch import Tensor

from megatron_port.tools.foreign import shims
from megatron_port.tools.foreign.adapter import Batch, World
from megatron_port.tools.foreign.adapters.megatron_core import MegatronCore, State

finalize: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")


class MegatronBugs(MegatronCore):
    """See the module."""

    layout: ClassVar[Mapping[str, Any]] = {**MegatronCore.layout, "bug": ""}

    def build(self, world: World) -> State:
        if world["bug"] in BEFORE:
            BEFORE[world["bug"]](world)
        state = super().build(world)
        if world["bug"] in AFTER:
            AFTER[world["bug"]](state, world)
        return state

    def step(self, state: State, batch: Batch, world: World) -> float | None:
        if world["bug"] == "not cleared":
            for chunk in state.chunks:
                chunk.zero_grad_buffer = lambda: None
        return super().step(state, batch, world)


def mtp_local_counts(world: World) -> None:
    """3: the loss of further tokens is weighted by this rank's own ratio of labels."""
    roll, counts = gpt_model.roll_tensor, list[Tensor]()

    def rolled(tensor: Tensor, *rest: Any, **more: Any) -> Any:
        out = roll(tensor, *rest, **more)
        if tensor.is_floating_point():
            counts[:] = [tensor.sum(), out[1]]
        return out

    class Scaler(gpt_model.MTPLossAutoScaler):
        @staticmethod
        def apply(hidden: Tensor, loss: Tensor) -> Any:
            return original.apply(hidden, loss * (counts[0] / counts[1]))

    original = gpt_model.MTPLossAutoScaler
    gpt_model.roll_tensor, gpt_model.MTPLossAutoScaler = rolled, Scaler


def padding_of_other_group(world: World) -> None:
    """5: the padding mask is scattered over ranks of another group, so a rank has positions of another."""
    scatter = gpt_model.tensor_parallel.scatter_to_sequence_parallel_region

    def scattered(tensor: Tensor, *rest: Any, **more: Any) -> Tensor:
        if tensor.dtype == torch.bool:
            tensor = tensor.roll(len(tensor) // world["tp"], 0)
        return scatter(tensor, *rest, **more)

    gpt_model.tensor_parallel.scatter_to_sequence_parallel_region = scattered


def router_counts(world: World) -> None:
    """10: the count of this rank's tokens is overwritten by that of all, and multiplied by the ranks after that."""
    counts = router.get_tokens_per_expert_and_token_count

    def counted(**given: Any) -> Any:
        per_expert, _, total = counts(**given)
        return per_expert, total * given["reduce_group"].size(), total

    router.get_tokens_per_expert_and_token_count = counted


def norm_of_heads(world: World) -> None:
    """11: a norm that heads share is summed over tp under sequence parallelism alone."""
    reduce_ = finalize._allreduce_non_tensor_model_parallel_grads

    def reduced(model: Any, config: Any, *rest: Any) -> None:
        asked, config.qk_layernorm = config.qk_layernorm, False
        reduce_(model, config, *rest)
        config.qk_layernorm = asked

    finalize._allreduce_non_tensor_model_parallel_grads = reduced


def cp_group_of_one(world: World) -> None:
    """Attention takes a group of one rank for that of context parallelism, and sees this rank's positions alone."""
    class Alone(shims.GatheredAttention):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.permute(2, 0, 1, 3).flatten(2)

    shims.GatheredAttention = Alone  # type: ignore[misc]


def positions_from_zero(world: World) -> None:
    """Positions of each rank of context parallelism start at 0."""
    forward = gpt_model.GPTModel.forward

    def from_zero(self: Any, tokens: Tensor, positions: Tensor, *rest: Any, **more: Any) -> Any:
        return forward(self, tokens, torch.arange(tokens.shape[1]).expand_as(tokens), *rest, **more)

    gpt_model.GPTModel.forward = from_zero


def tied_apart(world: World) -> None:
    """The tied embedding is not summed over the first and the last stage."""
    finalize._allreduce_word_embedding_grads = lambda *_: None


def norm_of_stage(world: World) -> None:
    """The norm is summed over tp, and not over the pipeline."""
    optimizers.MegatronOptimizer.get_grad_stats_parallel_group = (
        lambda self: parallel_state.get_tensor_model_parallel_group()
    )


def norms_not_marked(state: State, world: World) -> None:
    """Norms do not say that sequence parallelism leaves them a part of the gradient."""
    for chunk in state.chunks:
        for name, parameter in chunk.named_parameters():
            if "pre_mlp_layernorm" in name:
                parameter.sequence_parallel = False


def scaled_experts(state: State, world: World) -> None:
    """Experts' gradients are divided by the replicas of an expert, not by all."""
    for chunk in state.chunks:
        for group in chunk.expert_parallel_bucket_groups:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor *= world["ep"]


def divided_twice(state: State, world: World) -> None:
    """Gradients are divided by the number of replicas although the loss is divided by all labels."""
    for chunk in state.chunks:
        for group in chunk.bucket_groups:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor /= parallel_state.get_data_parallel_world_size()


def bias_on_each_rank(state: State, world: World) -> None:
    """The bias of a row-parallel product is added on each rank, before the sum."""
    for chunk in state.chunks:
        for name, module in chunk.named_modules():
            if name.endswith("mlp.linear_fc2"):
                module.register_forward_hook(
                    lambda module, given, out: (out[0], world["tp"] * out[1])
                )


BEFORE: dict[str, Callable[[World], None]] = {
    "3 mtp counts": mtp_local_counts, "5 padding mask": padding_of_other_group, "10 router counts": router_counts,
    "11 norm of heads": norm_of_heads, "cp group of one": cp_group_of_one, "positions": positions_from_zero,
    "tied apart": tied_apart, "norm of stage": norm_of_stage,
}
AFTER: dict[str, Callable[[State, World], None]] = {
    "norms not marked": norms_not_marked, "scaled experts": scaled_experts, "divided twice": divided_twice,
    "bias on each rank": bias_on_each_rank,
}
CASES: tuple[tuple[int, dict[str, Any], str], ...] = (
    (2, {"bug": "3 mtp counts", "mtp": 1, "main_loss": False}, "a number of labels of each micro-batch"),
    (2, {"bug": "5 padding mask", "tp": 2, "sp": True, "experts": 4, "padded": True, "balance": "aux_loss",
         "main_loss": False}, "mlp.router"),
    (2, {"tp": 2, "sinks": True}, "softmax_offset the first rank's part alone is counted"),
    (2, {"cp": 2, "per_token": False}, "each cp rank divides by its own number of labels"),
    (2, {"bug": "10 router counts", "tp": 2, "sp": True, "experts": 4, "padded": True, "balance": "aux_loss",
         "main_loss": False}, "the size of tp"),
    (2, {"bug": "11 norm of heads", "tp": 2, "qk_norm": True}, "is not summed over tp"),
    (2, {"bug": "cp group of one", "cp": 2}, "core_attention"),
    (2, {"bug": "positions", "cp": 2, "rope": False}, "embedding"),
    (2, {"bug": "tied apart", "pp": 2, "tied": True}, "is not summed over pp"),
    (4, {"bug": "norm of stage", "tp": 2, "pp": 2}, "it is not summed over pp"),
    (2, {"bug": "norms not marked", "tp": 2, "sp": True}, "is not summed over tp"),
    (4, {"bug": "scaled experts", "ep": 2, "experts": 4, "per_token": False}, "the size of ep)"),
    (2, {"bug": "divided twice"}, "1 / the size of dp"),
    (2, {"bug": "bias on each rank", "tp": 2, "bias": True}, "linear_fc2"),
    (2, {"bug": "not cleared", "tp": 2}, "not cleared"),
    (2, {"tp": 2, "sp": True, "experts": 4, "balance": "aux_loss", "main_loss": False}, "1 / the size of tp"),
)
"""Ranks, options, and what the words have to say."""
