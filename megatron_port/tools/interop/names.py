"""Our names and shapes beside Megatron-DeepSpeed's.

There a model is a ``PipelineModule`` whose layers are numbered: 0 casts its
input, 1 is the embedding, 2 to L+1 are the transformer layers, L+2 is the final
norm and L+3 the head (microsoft/Megatron-DeepSpeed since 2023). A parameter's
name is its layer's number and its name in the layer; tied embeddings are
``tied_modules.embed.*``. BigScience's fork has two transposing layers more; see
``megatron_files``, which finds the layers by what they hold.

The fused query-key-value rows are in our order there (checkpoint version 2 and
later): by key/value group, its queries, its key, its value.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.errors import CheckpointError
from megatron_port.core.model.shapes import model_records
from megatron_port.run.saved_state import state_records

Shape = tuple[int, ...]

INSIDE = {
    "norm1": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.output": "self_attention.dense",
    "norm2": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
"""Module of a transformer layer here → there."""
FIRST_LAYER = 2
"""Number of the first transformer layer in the pipeline there."""


@dataclass(frozen=True)
class Foreign:
    """A parameter of ours as Megatron-DeepSpeed knows it."""

    record: ParameterRecord
    """Ours."""
    name: str
    """Its name in a pipeline there, e.g. ``2.mlp.dense_4h_to_h.weight``."""
    shape: Shape
    """Its whole shape there, the vocabulary unpadded."""
    cat_dim: int | None
    """Dimension (there) along which tensor-parallel slices are joined; None: every rank holds it whole."""
    parts: int
    """Matrices joined along ``cat_dim`` in each slice (SwiGLU: gate and up)."""
    vocabulary: bool
    """Dimension 0 is the vocabulary, padded there."""

    def local_shape(self, tp: int, padded_vocab: int) -> Shape:
        """Shape of one rank's slice there; ``padded_vocab``: rows of a vocabulary matrix over all ranks."""
        shape = list(self.shape)
        if self.vocabulary:
            shape[0] = padded_vocab
        if self.cat_dim is not None:
            shape[self.cat_dim] //= tp
        return tuple(shape)

    def box(self, rank: int, tp: int, padded_vocab: int) -> tuple[Shape, Shape]:
        """Offset and shape, in our tensor, of the slice of tensor-parallel rank ``rank``; padding left out.

        The slice's row-major elements are the box's, in the same order, followed by padding.
        """
        ours, dim = self.record.shape, self.record.split_dim
        if self.cat_dim is None or dim is None:
            return (0,) * len(ours), ours
        per_rank = (padded_vocab if self.vocabulary else ours[dim]) // tp
        start = min(rank * per_rank, ours[dim])
        offset, shape = [0] * len(ours), list(ours)
        offset[dim], shape[dim] = start, min(per_rank, ours[dim] - start)
        return tuple(offset), tuple(shape)


def canonical_of(there: str) -> str | None:
    """Translate ``mlp.dense_4h_to_h.weight`` into ``mlp.down.weight``; None for a name that no layer of ours has."""
    module, _, suffix = there.rpartition(".")
    ours = {theirs: ours for ours, theirs in INSIDE.items()}.get(module)
    return f"{ours}.{suffix}" if ours and suffix in ("weight", "bias") else None


def megatron_names(model: ModelConfig) -> dict[str, Foreign]:
    """Canonical name → :class:`Foreign`, for every parameter of ``model``."""
    return {name: _foreign(record, _name(name, model), model) for name, record in model_records(model).items()}


def canonical_names(model: ModelConfig) -> dict[str, Foreign]:
    """Canonical name → :class:`Foreign` of that name, for every parameter of ``model`` and every buffer."""
    return {name: _foreign(record, name, model) for name, record in state_records(model).items()}


def _foreign(record: ParameterRecord, there: str, model: ModelConfig) -> Foreign:
    packed = record.name.rpartition(".")[0].endswith(("mlp.up", "mlp.shared.up")) and model.gated
    shape = (prod(record.shape[:2]), *record.shape[2:]) if packed else record.shape
    cat_dim = None if record.split_dim is None else record.split_dim - packed
    vocabulary = record.name in ("embedding.word.weight", "head.weight")
    return Foreign(record, there, shape, cat_dim, 2 if packed else 1, vocabulary)


def _name(ours: str, model: ModelConfig) -> str:
    embedding = "tied_modules.embed" if model.tie_embeddings else str(FIRST_LAYER - 1)
    fixed = {
        "embedding.word.weight": f"{embedding}.word_embeddings.weight",
        "embedding.position.weight": f"{embedding}.position_embeddings.weight",
        "final_norm.weight": f"{FIRST_LAYER + model.num_layers}.weight",
        "final_norm.bias": f"{FIRST_LAYER + model.num_layers}.bias",
        "head.weight": f"{FIRST_LAYER + model.num_layers + 1}.lm_head.weight",
    }
    if ours in fixed:
        return fixed[ours]
    _, index, *rest = ours.split(".", 2)
    module, _, suffix = rest[0].rpartition(".") if rest else ("", "", "")
    if module not in INSIDE:
        raise CheckpointError(
            f"{ours}: Megatron-DeepSpeed's layers have no such parameter; export to hf, dcp, or universal "
            "with --names canonical"
        )
    return f"{FIRST_LAYER + int(index)}.{INSIDE[module]}.{suffix}"
