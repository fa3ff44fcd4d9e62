"""A new checkpoint of a compressed model: read slice by slice through a reader, staged on disk, committed at once.

It is step 0 of a new run: weights and the buffers of routers, no optimizer state. Its manifest says what it was made of
and how (``extra.compressed``); beside it lie ``model.toml``, which a run names in ``extends``, and the source's
tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_port.core.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_port.core.checkpoint.shard import write_text
from megatron_port.core.checkpoint.slices import slabs
from megatron_port.core.config.checks import problems
from megatron_port.core.config.dump import as_dict
from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.dist.record import BUFFER, WEIGHT, StateReader
from megatron_port.core.errors import CheckpointError, ConfigError
from megatron_port.core.io.logging import Advance, Tally, silent
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.shapes import buffer_shapes, parameter_shapes
from megatron_port.ext.corpora.hf_tokenizer import KEPT, copy_companions
from megatron_port.ext.experts.spec import LAST_STEP
from megatron_port.ext.weights.settings import factored_shapes
from megatron_port.run.saved_model import model_of
from megatron_port.run.weights import Weights
from megatron_port.tools.interop.dcp import Imported, Stage, commit_import, scratch
from megatron_port.tools.interop.run_import import MODEL_FILE, SLAB_BYTES, model_toml

# Which dimension of which parameter belongs to which size of the model. Plain Python, without torch.
#
# Pruning a size keeps the same indices along every dimension that belongs to it, so this table is all that a conversion
# needs to know of the model. A parameter that it does not list is refused: one that somebody adds to the model's spec
# cannot be pruned by accident.

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


def convert(
    source: Weights, model: ModelConfig, read: StateReader, out: Path, *, provenance: Mapping[str, Any],
    slab_bytes: int = SLAB_BYTES, note: Callable[[str], None] = print, advance: Advance = silent,
) -> Path:
    """Write ``model``, whose weights ``read`` gives, as ``out/step-00000000``; return that folder.

    Args:
        provenance: what was done, JSON values; the source's own is kept within it.
        slab_bytes: memory that one slice takes; the whole model is never in memory.

    Raises:
        ConfigError: no run can train such a model, and what to change.
        CheckpointError: the source is damaged, a checkpoint is there already, or the disk refuses. Nothing is left.
    """
    wrong = [text for text in problems(RunConfig(model=model, engine="native")) if text.startswith("model.")]
    if wrong:
        raise ConfigError(wrong)
    shapes = {(name, WEIGHT): shape for name, shape in parameter_shapes(model).items()}
    shapes |= {(name, BUFFER): shape for name, shape in buffer_shapes(model).items()}
    size = 4 * sum(map(prod, shapes.values()))
    with scratch(out, 2 * size) as folder:
        stage = Stage(folder, put_down=Tally(advance, size).add)
        for (name, kind), shape in shapes.items():
            for offset, extent in slabs(shape, max(1, slab_bytes // 4)):
                part = torch.zeros(extent) if name.endswith(LAST_STEP) else read(name, kind, offset, extent)
                stage.put(name, kind, shape, offset, part)
        found = Imported(model=model, pieces=stage.pieces(), **_described(source, model, provenance))
        path = commit_import(found, out, source=source.path, weights_only=True, note=lambda text: None)
    if source.tokenizer_folder is not None:
        copy_companions(source.tokenizer_folder, out / KEPT)
    write_text(out / MODEL_FILE, model_toml(model))
    return path


def _described(source: Weights, model: ModelConfig, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the manifest says beside the weights: the source's configuration with the new model in it, its
    tokenizer, and the provenance."""
    made: dict[str, Any] = {"source": str(source.path), **provenance}
    config = as_dict(RunConfig(model=model))
    if not (source.path / "manifest.json").is_file():
        return {"config": config, "extra": {"compressed": made}}
    checkpoint = open_checkpoint(source.path)
    state = checkpoint.manifest.state
    checkpoint.close()
    made |= {"source_step": state.step, "source_tokens": state.tokens}
    if "compressed" in state.extra:
        made["before"] = state.extra["compressed"]
    saved = state.config if isinstance(state.config, dict) else {}
    config |= {**saved, "model": config["model"], "fine_tuning": config["fine_tuning"]}
    extra: dict[str, Any] = {"compressed": made}
    if isinstance(state.extra.get("tokenizer"), str):
        extra["tokenizer"] = state.extra["tokenizer"]
    return {"config": config, "extra": extra, "tokenizer": dict(state.tokenizer), "data": dict(state.data)}


# Low-rank factors of chosen linears: their ranks, from energy or a budget, and the reader of the factored model.
#
# W [out, in] becomes B A with B [out, r] and A [r, in] from its singular value decomposition, half of each singular
# value's root in either: of all products of rank r that is the nearest to W (Eckart and Young). Matrices that are in
# one parameter (queries, keys and values; gate and up) are factored together. One matrix is in memory at a time, in
# float64.

Box = tuple[int, ...]
NAMES = {"qkv": "attention.qkv", "output": "attention.output", "up": "mlp.up", "down": "mlp.down"}
"""Name of a rank → that of the linear within a layer."""
TILE = 64
"""Multiple that matrix products of GPUs compute without waste."""


def with_ranks(model: ModelConfig, ranks: Mapping[str, int]) -> ModelConfig:
    """Return ``model`` with these linears factored. Raises ConfigError: a linear that it has not, or a rank too large.
    """
    shapes, out = factored_shapes(model), []
    for name, rank in ranks.items():
        if name not in shapes:
            out.append(f"--factor {name}: this model has {', '.join(shapes)}")
            continue
        rows, columns = shapes[name]
        most = rows * columns // (rows + columns)
        if not 0 < rank <= most:
            out.append(f"--factor {name}={rank}: the matrix is {rows} x {columns}, whose factors are smaller than it "
                       f"from rank 1 to {most}")
    if out:
        raise ConfigError(out)
    asked: dict[str, Any] = {f"{name}_rank": rank for name, rank in ranks.items()}
    return replace(model, **asked)


def ranks_by_budget(model: ModelConfig, names: tuple[str, ...], share: float) -> dict[str, int]:
    """Return the largest ranks whose factors have at most ``share`` of the elements of their matrices; those above
    4 x ``TILE`` are multiples of it."""
    ranks = {name: max(1, int(share * a * b) // (a + b)) for name, (a, b) in _shapes(model, names).items()}
    return {name: rank - rank % TILE if rank > 4 * TILE else rank for name, rank in ranks.items()}


def ranks_by_energy(
    model: ModelConfig, names: tuple[str, ...], share: float, read: StateReader,
    advance: Callable[[str], None] = lambda name: None,
) -> dict[str, int]:
    """Return the least ranks with which every layer's matrix keeps ``share`` of the sum of its squared singular values.
    """
    out = dict.fromkeys(_shapes(model, names), 1)
    for weight, name in _weights(model, names).items():
        advance(weight)
        squares = torch.linalg.svdvals(_matrix(read, weight, parameter_shapes(model)[weight])).square()
        kept = squares.cumsum(0) / squares.sum()
        out[name] = max(out[name], int((kept < share - 1e-12).sum()) + 1)
    return out


def _shapes(model: ModelConfig, names: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    shapes = factored_shapes(model)
    unknown = [name for name in names if name not in shapes]
    if unknown:
        raise ConfigError(f"--factor {unknown[0]}: this model has {', '.join(shapes)}")
    return {name: shapes[name] for name in names or shapes}


def _weights(model: ModelConfig, names: tuple[str, ...]) -> dict[str, str]:
    """Canonical name of each weight of the linears ``names`` → the name of its rank."""
    by_linear = {linear: name for name, linear in NAMES.items() if name in _shapes(model, names)}
    return {
        f"layers.{i}.{spec.name}.weight": by_linear[spec.name]
        for i, layer in enumerate(model_spec(model).layers) for spec in layer.linears if spec.name in by_linear
    }


def _matrix(read: StateReader, name: str, shape: Box) -> torch.Tensor:
    """Return a whole weight as float64 [out, in]."""
    return read(name, WEIGHT, (0,) * len(shape), shape).double().flatten(0, -2)


def factors_of(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (A [r, in], B [out, r]) of a float64 matrix [out, in]."""
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    root = values[:rank].sqrt()
    return root[:, None] * v[:rank], u[:, :rank] * root


class FactoredWeights:
    """A reader of ``model``, some of whose linears are factored, over the weights of the same model without factors."""

    def __init__(self, model: ModelConfig, read: StateReader) -> None:
        whole = without_factors(model)
        self._read, self._shapes = read, parameter_shapes(whole)
        by_name = _weights(whole, tuple(model.ranks))
        self._ranks = {weight: model.ranks[name] for weight, name in by_name.items()}
        self._low = {f"{weight.removesuffix('.weight')}_low.weight": weight for weight in by_name}
        self._last: tuple[str, torch.Tensor, torch.Tensor] | None = None

    def __call__(
        self, name: str, kind: str, offset: Box, shape: Box, /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a slice of a tensor (``dist.record.StateReader``), float32 where it is a factor."""
        weight = self._low.get(name, name)
        if kind != WEIGHT or weight not in self._ranks:
            return self._read(name, kind, offset, shape, out=out)
        if self._last is None or self._last[0] != weight:
            self._last = None  # before the next takes its place in memory
            self._last = weight, *factors_of(_matrix(self._read, weight, self._shapes[weight]), self._ranks[weight])
        _, low, high = self._last
        whole = low if name in self._low else high.view(*self._shapes[weight][:-1], -1)
        return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape))].float().contiguous()


def without_factors(model: ModelConfig) -> ModelConfig:
    """Return the model of whole matrices that computes the same."""
    return replace(model, qkv_rank=0, output_rank=0, up_rank=0, down_rank=0)


class MultipliedWeights:
    """A reader of whole matrices over the factors of ``model``: W = B A in float64, returned as float32."""

    def __init__(self, model: ModelConfig, read: StateReader) -> None:
        self._read, self._shapes = read, parameter_shapes(model)
        self._ranks = {
            weight: model.ranks[name] for weight, name in _weights(without_factors(model), tuple(model.ranks)).items()
        } if model.ranks else {}

    def __call__(
        self, name: str, kind: str, offset: Box, shape: Box, /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a slice of a tensor (``dist.record.StateReader``)."""
        if kind != WEIGHT or name not in self._ranks:
            return self._read(name, kind, offset, shape, out=out)
        rank = self._ranks[name]
        high = self._read(name, WEIGHT, (*offset[:-1], 0), (*shape[:-1], rank))
        low = self._read(f"{name.removesuffix('.weight')}_low.weight", WEIGHT, (0, offset[-1]), (rank, shape[-1]))
        dtype = torch.promote_types(high.dtype, torch.float32)
        return (high.double() @ low.double()).to(dtype)


# A checkpoint as one of the model that says the same without what only this program knows: factors, shared layers.
#
# Hugging Face's families have neither, so exports are made of this.

def plain_model(model: ModelConfig) -> ModelConfig:
    """Return the model of whole matrices, one set for each layer, that computes what ``model`` does."""
    return replace(without_factors(model), shared_layers=1)


class PlainCheckpoint(Checkpoint):
    """The weights of :func:`plain_model`, and the buffers as they are: factored matrices are multiplied out, and each
    layer has a copy of weights that it shares."""

    def __init__(self, of: Checkpoint) -> None:
        state = of.manifest.state
        model = model_of(state.config, str(of.path))
        plain = plain_model(model)
        config: dict[str, Any] = {**state.config, "model": as_dict(plain)}
        super().__init__(of.path, replace(of.manifest, state=replace(state, config=config)))
        self._of, self._shapes = of, parameter_shapes(plain)
        self._model = model
        self._weights = MultipliedWeights(replace(model, shared_layers=1), self._read_owner)

    def _read_owner(
        self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read a weight of a layer from the layer whose weights it uses."""
        layer, relative = layer_of(name)
        if layer is not None and kind == WEIGHT:
            name = f"layers.{self._model.owner_of(layer)}.{relative}"
        return self._of.read(name, kind, offset, shape, out=out)

    def names(self, kind: str = WEIGHT) -> Iterator[str]:
        """Yield the names of the plain model's parameters, or of the buffers."""
        return iter(self._shapes) if kind == WEIGHT else super().names(kind)

    def shape(self, name: str, kind: str = WEIGHT) -> tuple[int, ...]:
        """Return the global logical shape."""
        return self._shapes[name] if kind == WEIGHT else super().shape(name, kind)

    def dtype(self, name: str, kind: str = WEIGHT) -> torch.dtype:
        """Return the dtype of what is read."""
        return torch.float32 if kind == WEIGHT else super().dtype(name, kind)

    def read(
        self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a slice of a tensor of the plain model (``Checkpoint.read``)."""
        found = self._weights(name, kind, offset, shape)
        return found.float() if kind == WEIGHT else found


def plain(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint as one of a plain model; itself where it is one already."""
    model = model_of(checkpoint.manifest.state.config, str(checkpoint.path))
    return checkpoint if plain_model(model) == model else PlainCheckpoint(checkpoint)


# Layers that share weights, out of layers that each have their own: the mean of each group's.



class MeanWeights:
    """A reader (``dist.record.StateReader``) of ``model``, whose layers share weights, over the same model without:
    a group's weights are the mean of its layers', in float64. Where they are equal, so are the models."""

    def __init__(self, model: ModelConfig, read: StateReader) -> None:
        self._model, self._read = model, read

    def __call__(
        self, name: str, kind: str, offset: Box, shape: Box, /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a slice of a tensor, in the dtype of the source."""
        layer, relative = layer_of(name)
        if layer is None or kind != WEIGHT:
            return self._read(name, kind, offset, shape, out=out)
        group = range(layer, min(layer + self._model.shared_layers, self._model.num_layers))
        first = self._read(f"layers.{layer}.{relative}", kind, offset, shape)
        total = first.double()
        for other in group[1:]:
            total += self._read(f"layers.{other}.{relative}", kind, offset, shape)
        return (total / len(group)).to(first.dtype)
