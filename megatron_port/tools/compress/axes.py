"""Which dimension of which parameter belongs to which size of the model. Plain Python, without torch.

Pruning a size keeps the same indices along every dimension that belongs to it, so this table is all that a conversion
needs to know of the model. A parameter that it does not list is refused: one that somebody adds to the model's spec
cannot be pruned by accident.
"""

from __future__ import annotations

from megatron_port.core.errors import CheckpointError

HIDDEN, FFN, HEADS, VALUES, PROJECTION, QUERIES, KEYS, LATENT_KEYS, EXPERTS = (
    "hidden", "ffn", "heads", "values", "projection", "queries", "keys", "latent_keys", "experts"
)
"""Sizes: the residual stream; rows of a dense MLP; one element per query head; the elements of all heads' values; the
rows of the fused projection; of all heads' queries; of all key/value heads' keys; of the projection that makes keys
and values from a latent; experts."""
Axis = str | None
"""None: a dimension that no size governs."""

_TOP: dict[str, tuple[Axis, ...]] = {
    "embedding.word.weight": (None, HIDDEN), "embedding.position.weight": (None, HIDDEN),
    "head.weight": (None, HIDDEN), "head.bias": (None,), "final_norm.weight": (HIDDEN,), "final_norm.bias": (HIDDEN,),
}
_LAYER: dict[str, tuple[Axis, ...]] = {
    **{f"{norm}.{part}": (HIDDEN,) for norm in ("norm1", "post_norm1", "norm2", "post_norm2")
       for part in ("weight", "bias")},
    "attention.qkv.weight": (PROJECTION, HIDDEN), "attention.qkv.bias": (PROJECTION,),
    "attention.query_down.weight": (None, HIDDEN), "attention.query_up.weight": (QUERIES, None),
    "attention.query.weight": (QUERIES, HIDDEN), "attention.kv_down.weight": (None, HIDDEN),
    "attention.kv_up.weight": (LATENT_KEYS, None), "attention.kv_norm.weight": (None,),
    "attention.output.weight": (HIDDEN, VALUES), "attention.output.bias": (HIDDEN,), "attention.sinks": (HEADS,),
    "mlp.up.weight": (FFN, HIDDEN), "mlp.up.bias": (FFN,), "mlp.down.weight": (HIDDEN, FFN), "mlp.down.bias": (HIDDEN,),
    "mlp.router.weight": (EXPERTS, HIDDEN), "mlp.router.bias": (EXPERTS,), "mlp.router.balance_bias": (EXPERTS,),
    "mlp.router.load": (EXPERTS,),
    "mlp.experts.up.weight": (None, HIDDEN), "mlp.experts.up.bias": (None,), "mlp.experts.down.weight": (HIDDEN, None),
    "mlp.experts.down.bias": (HIDDEN,),
    "mlp.shared.up.weight": (None, HIDDEN), "mlp.shared.up.bias": (None,), "mlp.shared.down.weight": (HIDDEN, None),
    "mlp.shared.down.bias": (HIDDEN,), "mlp.shared_gate.weight": (None, HIDDEN),
}
"""Names relative to the layer, and the last dimensions of each."""


def layer_of(name: str) -> tuple[int | None, str]:
    """Split a canonical name into the layer's number and the name relative to it; None: it is of no layer."""
    first, _, rest = name.partition(".")
    number, _, relative = rest.partition(".")
    return (int(number), relative) if first == "layers" and number.isdecimal() else (None, name)


def axes_of(name: str, shape: tuple[int, ...], *, gated: bool, norm_over_heads: bool) -> tuple[Axis, ...]:
    """Return the size that governs each dimension of a parameter or buffer.

    ``gated``: MLPs keep two matrices in one parameter; ``norm_over_heads``: norms of queries and keys have a weight for
    each element of all heads.

    Raises:
        CheckpointError: the parameter is not in the table.
    """
    layer, relative = layer_of(name)
    known = _TOP if layer is None else _LAYER
    if layer is not None and relative in ("attention.query_norm.weight", "attention.key_norm.weight"):
        tail: tuple[Axis, ...] = ((QUERIES if "query" in relative else KEYS) if norm_over_heads else None,)
    elif relative in known:
        tail = known[relative]
    else:
        raise CheckpointError(f"{name}: not known to pruning; a checkpoint with it cannot be pruned")
    lead: tuple[Axis, ...] = (EXPERTS,) if relative.startswith("mlp.experts.") else ()
    lead += (None,) if gated and relative.rpartition(".")[0].endswith(".up") else ()
    found = (*lead, *tail)
    if len(found) != len(shape):
        raise CheckpointError(f"{name}: it has {len(shape)} dimensions, {len(found)} are expected")
    return found
