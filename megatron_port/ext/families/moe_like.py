"""Fields of experts that the ``config.json`` of several families share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_port.core.config.moe import MoEConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.fields import Fields

HARMLESS = frozenset({"output_router_logits", "router_aux_loss_coef"})
"""A loss that transformers adds where its caller asks for it; ours is ``model.moe.balance_loss``."""


def pattern(f: Fields, sparse: Sequence[bool], what: str) -> dict[str, int]:
    """Return ``first_dense`` and ``every`` of the layers that have experts, at least one of them.

    Raises:
        CheckpointError: they do not follow one another at equal distances to the end; ``what`` asks for that.
    """
    layers, first = len(sparse), list(sparse).index(True)
    for every in range(1, first + 2):
        found = MoEConfig(num_experts=1, first_dense=first + 1 - every, every=every)
        if all(found.has_experts(layer) == has for layer, has in enumerate(sparse)):
            return {"first_dense": found.first_dense, "every": every}
    dense = [layer for layer in range(layers) if not sparse[layer]]
    raise f.fault(f"{what} makes layers {dense!r:.80} of {layers} dense; this model has experts in every n-th layer")


def sparse_layers(f: Fields, layers: int) -> list[bool]:
    """Return which layers have experts by ``mlp_only_layers`` and ``decoder_sparse_step`` (Qwen)."""
    dense, step = f.get("mlp_only_layers", list[int]()), f.get("decoder_sparse_step", 1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]


def qwen_experts(f: Fields, layers: int, *, experts: int, top_k: int, width: int, **more: Any) -> MoEConfig:
    """Return the experts of Qwen's models; the arguments are the family's defaults."""
    sparse = sparse_layers(f, layers)
    found = MoEConfig(
        num_experts=f.get("num_experts", experts, "num_local_experts"), top_k=f.get("num_experts_per_tok", top_k),
        ffn_hidden_size=f.get("moe_intermediate_size", width), normalize=f.get("norm_topk_prob", False), **more,
    )
    if found.num_experts < 1 or not any(sparse):
        raise f.fault(
            f"num_experts {found.num_experts}, mlp_only_layers and decoder_sparse_step leave no layer with experts"
        )
    return MoEConfig(**{**vars(found), **pattern(f, sparse, "mlp_only_layers and decoder_sparse_step")})


def qwen_experts_there(model: ModelConfig) -> dict[str, Any]:
    """Fields that :func:`qwen_experts` reads."""
    moe = model.moe
    return {
        "num_experts": moe.num_experts, "num_experts_per_tok": moe.top_k, "moe_intermediate_size": model.expert_size,
        "norm_topk_prob": moe.normalize, "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(model.num_layers) if not moe.has_experts(layer)],
    }


def experts_named(block: str, gate: str, up: str, down: str) -> dict[str, str | tuple[str, ...]]:
    """Return the names of router and experts below ``block``."""
    each = f"{block}.experts.{{}}"
    return {
        "mlp.router": f"{block}.gate", "mlp.experts.up": (f"{each}.{gate}", f"{each}.{up}"),
        "mlp.experts.down": f"{each}.{down}",
    }


USUAL = experts_named("mlp", "gate_proj", "up_proj", "down_proj")
"""Names of router and experts in most families."""

