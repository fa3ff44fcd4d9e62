"""Import of Megatron-DeepSpeed checkpoints: layer files with tensor-parallel slices, and ZeRO-1 shards.

Nothing is computed: a slice of a tensor-parallel rank is a box of our tensor,
and a ZeRO fragment a flat range of one, which is what our format stores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.record import StatePiece
from megatron_port.core.errors import CheckpointError
from megatron_port.core.optim.rules import AdamW
from megatron_port.tools.interop.dcp import Imported, tagged_folder
from megatron_port.tools.interop.universal import Foreign, canonical_of, megatron_names
from megatron_port.tools.interop.unpickle import Stubbed, read_pickles

# Files of a Megatron-DeepSpeed checkpoint, and what each layer file is.
#
# ::
#
#     layer_03-model_01-model_states.pt               pipeline layer 3, tensor-parallel rank 1
#     mp_rank_00_model_states.pt                      arguments and counters (without a pipeline also the weights)
#     bf16_zero_pp_rank_0_mp_rank_05_optim_states.pt  ZeRO-1 shard of replica 0 on model-parallel rank 5
#
# Model-parallel ranks count tensor-parallel ranks first: rank = stage * tp + tensor rank.

_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_EMBEDDING = {
    "word_embeddings.weight": "embedding.word.weight",
    "position_embeddings.weight": "embedding.position.weight",
    "position_embeddings.local_embeddings.weight": "embedding.position.weight",
}
_NOT_PARAMETERS = re.compile(r"(?:^|\.)(?:_extra_state|inv_freq)$|rotary_pos_emb")


@dataclass
class MegatronFiles:
    """The files of one checkpoint by coordinates."""

    folder: Path
    layers: dict[int, dict[int, Path]] = field(default_factory=dict)
    """Pipeline layer → tensor-parallel rank → file."""
    model: dict[int, Path] = field(default_factory=dict)
    """Model-parallel rank → file."""
    optimizer: dict[tuple[int, int], Path] = field(default_factory=dict)
    """(replica, model-parallel rank) → file."""

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return len(next(iter(self.layers.values()))) if self.layers else len(self.model)


def megatron_folder(source: Path) -> Path | None:
    """The folder with the files: ``source``, or what its ``latest`` names; None if there is none."""
    def here(folder: Path) -> bool:
        return folder.is_dir() and any(_LAYER.fullmatch(p.name) or _MODEL.fullmatch(p.name) for p in folder.iterdir())

    return tagged_folder(source, "latest", here)


def find_files(folder: Path) -> MegatronFiles:
    """List and check: no rank of a layer and no shard is missing.

    Raises:
        CheckpointError: files are missing, or it is a mixture of experts.
    """
    found = MegatronFiles(folder)
    for path in sorted(folder.iterdir()):
        if "_expert_" in path.name:
            raise CheckpointError(f"{path}: experts of a mixture; only dense models are read")
        if match := _LAYER.fullmatch(path.name):
            found.layers.setdefault(int(match[1]), {})[int(match[2] or 0)] = path
        elif match := _MODEL.fullmatch(path.name):
            found.model[int(match[1])] = path
        elif match := _OPTIMIZER.fullmatch(path.name):
            found.optimizer[int(match[1]), int(match[2])] = path
    if 0 not in found.model:
        raise CheckpointError(f"{folder}: mp_rank_00_model_states.pt is missing")
    every = sorted({rank for ranks in found.layers.values() for rank in ranks})
    for layer, ranks in found.layers.items():
        missing = [r for r in range(len(every)) if r not in ranks]
        if missing:
            raise CheckpointError(
                f"{folder}: layer_{layer:02d}-model_{missing[0]:02d}-model_states.pt is missing ({len(every)} ranks)"
            )
    if found.optimizer:
        replicas, ranks_of = (1 + max(k[i] for k in found.optimizer) for i in (0, 1))
        lost = [(d, m) for d in range(replicas) for m in range(ranks_of) if (d, m) not in found.optimizer]
        if lost:
            raise CheckpointError(
                f"{folder}: the optimizer shard of replica {lost[0][0]}, model-parallel rank {lost[0][1]} is missing "
                f"({len(lost)} of {replicas * ranks_of}); --weights-only leaves the optimizer out"
            )
        if found.layers and ranks_of % found.tp:
            raise CheckpointError(
                f"{folder}: optimizer shards of {ranks_of} model-parallel ranks, but {found.tp} tensor-parallel ranks"
            )
    return found


def is_parameter(name: str) -> bool:
    """False for buffers that some versions save along."""
    return not _NOT_PARAMETERS.search(name)


def name_layers(keys: Mapping[int, Iterable[str]], where: Path) -> dict[tuple[int, str], str]:
    """Return (pipeline layer, name in it) → canonical name, from the names that each layer file has.

    Layers are told by what they hold, so functions between them (the two transposes of BigScience's fork) do not
    matter. The head's copy of a tied embedding is left out.

    Raises:
        CheckpointError: a name that no layer of ours has.
    """
    out: dict[tuple[int, str], str] = {}
    transformer = 0
    seen_embedding = False
    for layer in sorted(keys):
        names = [n for n in keys[layer] if is_parameter(n)]
        if "word_embeddings.weight" in names:
            if not seen_embedding:
                out |= {(layer, n): _EMBEDDING.get(n, "") for n in names}
            seen_embedding = True
        elif any(n.startswith("self_attention.") for n in names):
            out |= {(layer, n): f"layers.{transformer}.{ours}" if (ours := canonical_of(n)) else "" for n in names}
            transformer += 1
        elif set(names) <= {"weight", "bias"}:
            out |= {(layer, n): f"final_norm.{n}" for n in names}
        else:
            out |= {(layer, n): "head.weight" if n == "lm_head.weight" else "" for n in names}
    for (layer, name), ours in out.items():
        if not ours:
            raise CheckpointError(f"{where}: layer {layer} has {name}, which no layer of this model has")
    return out


def name_in_optimizer(name: str, layers: Mapping[tuple[int, str], str]) -> str | None:
    """Canonical name of a parameter of a ZeRO shard (``3.mlp.dense_4h_to_h.bias``, ``tied_modules.embed.*``)."""
    prefix, _, rest = name.partition(".")
    if prefix == "tied_modules":
        return _EMBEDDING.get(rest.partition(".")[2])
    return layers.get((int(prefix), rest)) if prefix.isdigit() else None


def name_without_pipeline(name: str) -> str | None:
    """Canonical name of ``language_model.encoder.layers.0.input_layernorm.weight`` and its like."""
    parts = name.removeprefix("module.").removeprefix("language_model.")
    if parts.startswith("embedding."):
        return _EMBEDDING.get(parts.removeprefix("embedding."))
    if parts == "output_layer.weight":
        return "head.weight"
    inside = parts.partition(".")[2] if parts.startswith(("encoder.", "transformer.")) else ""
    for norm in ("final_layernorm.", "final_norm."):
        if inside.startswith(norm):
            return f"final_norm.{inside.removeprefix(norm)}"
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", inside)
    if match is None:
        return None
    rest = match[2]
    if rest.startswith("attention."):
        rest = f"self_{rest}"
    ours = canonical_of(rest)
    return f"layers.{int(match[1])}.{ours}" if ours else None


# A model of ours from the arguments that Megatron-DeepSpeed saves with a checkpoint (``args``).

_REFUSED = (
    ("apply_layernorm_1p", True, "layer norms whose weight is stored minus one"),
    ("squared_relu", True, "squared ReLU"),
    ("apply_residual_connection_post_layernorm", True, "residuals taken after the norm"),
    ("embed_layernorm", True, "a norm after the embedding"),
    ("parallel_attn_mlp", True, "attention and MLP in parallel"),
)


class Arguments:
    """``args`` of a checkpoint with defaults: an argument that a version does not have."""

    def __init__(self, state: dict[str, Any], where: str) -> None:
        self.state, self.where = state, where

    def get(self, name: str, default: Any) -> Any:
        """The argument, or the default where it is absent or None."""
        value = self.state.get(name)
        return default if value is None else value

    def need(self, name: str) -> int:
        """An integer that must be there. Raises CheckpointError."""
        value = self.state.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CheckpointError(f"{self.where}: args.{name} is {value!r:.60}; give --model FILE.toml")
        return value


def model_from_args(state: dict[str, Any], where: str, *, vocab_size: int = 0) -> ModelConfig:
    """The model that ``args`` describes.

    ``vocab_size``: entries of the tokenizer. Megatron saves only the padded size; without it the padding is taken
    for entries.

    Raises:
        CheckpointError: an argument is missing, or asks for something that our model does not have.
    """
    a = Arguments(state, where)
    for name, value, what in _REFUSED:
        if bool(a.get(name, False)) is value:
            raise CheckpointError(f"{where}: trained with {what} (args.{name}), which this model does not have")
    experts = a.get("num_experts", [1])
    if experts not in ([1], 1, [], 0):
        raise CheckpointError(f"{where}: a mixture of experts (args.num_experts {experts}); only dense models are read")
    heads = a.need("num_attention_heads")
    hidden = a.need("hidden_size")
    head_size = int(a.get("kv_channels", hidden // max(heads, 1)))
    padded = a.need("padded_vocab_size")
    if not 0 <= vocab_size <= padded:
        raise CheckpointError(f"{where}: --vocab-size {vocab_size}, but the embedding has {padded} rows")
    rotary = bool(a.get("use_rotary_position_embeddings", False)) or _position(a) == "rotary"
    if _position(a) == "alibi":
        raise CheckpointError(f"{where}: trained with ALiBi positions, which this model does not have")
    if rotary and float(a.get("rotary_percent", 1.0)) != 1.0:
        raise CheckpointError(f"{where}: rotary positions on a part of each head (args.rotary_percent)")
    if not rotary and not a.get("add_position_embedding", True):
        raise CheckpointError(f"{where}: trained without positions, which this model does not have")
    groups = int(a.get("num_key_value_heads", heads))
    swiglu = bool(a.get("swiglu", False))
    return ModelConfig(
        name="imported", num_layers=a.need("num_layers"), hidden_size=hidden, num_attention_heads=heads,
        num_query_groups=0 if groups == heads else groups, head_dim=0 if head_size * heads == hidden else head_size,
        ffn_hidden_size=int(a.get("ffn_hidden_size", 4 * hidden)), vocab_size=vocab_size or padded,
        seq_length=a.need("max_position_embeddings") if not rotary else int(
            a.get("max_position_embeddings", a.get("seq_length", 1024))
        ),
        position_embedding="rope" if rotary else "learned", rope_theta=float(a.get("rope_theta", 10000.0)),
        normalization="rmsnorm" if a.get("normalization", "layernorm") == "rmsnorm" else "layernorm",
        norm_epsilon=float(a.get("layernorm_epsilon", 1e-5)), activation="swiglu" if swiglu else _gelu(a),
        add_bias=bool(a.get("add_bias_linear", True)),
        tie_embeddings=not a.get("untie_embeddings_and_output_weights", False),
        hidden_dropout=float(a.get("hidden_dropout", 0.0)), attention_dropout=float(a.get("attention_dropout", 0.0)),
        init_std=float(a.get("init_method_std", 0.02)),
    )


def _gelu(a: Arguments) -> Literal["gelu", "gelu_tanh"]:
    """The fused bias-GeLU of Megatron is the tanh form; without it, erf unless OpenAI's is asked for."""
    return "gelu_tanh" if a.get("bias_gelu_fusion", True) or a.get("openai_gelu", False) else "gelu"


def _position(a: Arguments) -> str:
    """``position_embedding_type``: in BigScience's fork an enum of 1 rotary, 2 absolute, 3 ALiBi; elsewhere a word."""
    value = a.get("position_embedding_type", None)
    if getattr(value, "args", None):
        value = value.args[0]
    known: dict[Any, str] = {1: "rotary", 3: "alibi", "rope": "rotary", "rotary": "rotary", "alibi": "alibi"}
    return known.get(value, "learned") if isinstance(value, (int, str)) else "learned"


Note = Callable[[str], None]
Weights = dict[tuple[str, int], torch.Tensor]
"""(canonical name, tensor-parallel rank) → that rank's slice."""


def read_megatron(
    folder: Path, scratch: Path, *, trusted: bool, model: ModelConfig | None = None, vocab_size: int = 0,
    weights_only: bool = False, note: Note = print,
) -> Imported:
    """Read a checkpoint of Megatron-DeepSpeed; converted files are in ``scratch`` until the result is written.

    Raises:
        CheckpointError: not trusted, files missing or damaged, or tensors that do not fit the model (``model``, or
            the one that the saved arguments describe).
    """
    files = find_files(folder)
    wanted = [files.model[0], *(p for ranks in files.layers.values() for p in ranks.values())]
    if not files.layers:
        wanted = list(files.model.values())
    elif not weights_only:
        wanted += files.optimizer.values()
    content = read_pickles(wanted, scratch, trusted=trusted, note=note)
    common = _mapping(content[files.model[0]], files.model[0])
    version = common.get("checkpoint_version", 3.0)
    if isinstance(version, (int, float)) and version < 2:
        raise CheckpointError(
            f"{files.model[0]}: checkpoint_version {version}: query, key and value rows are in another order before "
            "version 2; load and save it once with Megatron-DeepSpeed"
        )
    args = common.get("args")
    if model is None:
        if not isinstance(args, Stubbed) or not isinstance(args.state, dict):
            raise CheckpointError(f"{files.model[0]}: no arguments (args) in it; give --model FILE.toml")
        model = model_from_args(args.state, str(files.model[0]), vocab_size=vocab_size)
    table = megatron_names(model)
    if files.layers:
        layers, weights = _layer_weights(files, content)
    else:
        layers, weights = {}, _whole_weights(files, content)
        if files.optimizer and not weights_only:
            note("the optimizer of a run without a pipeline is not read: weights only")
    layout = _Layout(files.tp, _padded_vocab(weights, files.tp), table, folder)
    layout.check(weights)
    shards = {} if weights_only or not files.layers else {k: content[p] for k, p in files.optimizer.items()}
    pieces, steps, scale = _optimizer_pieces(shards, layers, layout)
    if not any(p.kind == "weight" for p in pieces):
        pieces = list(_weight_pieces(weights, layout, note))
    samples = args.get("consumed_train_samples") if isinstance(args, Stubbed) else None
    scalars: dict[str, float | int] = {"optimizer_steps": steps or 0}
    if scale is not None:
        scalars["loss_scale"] = scale
    return Imported(
        model=model, pieces=pieces, step=_count(common.get("iteration", common.get("global_steps"))),
        samples=_count(samples if samples is not None else common.get("global_samples")), scalars=scalars,
        extra={"skipped_total": _count(common.get("skipped_steps"))},
    )


@dataclass(frozen=True)
class _Layout:
    """Layout by which the source's tensors are split."""

    tp: int
    padded_vocab: int
    table: Mapping[str, Foreign]
    where: Path

    def ranks(self, name: str) -> range:
        """Tensor-parallel ranks whose slices make up the parameter."""
        return range(1 if self.table[name].cat_dim is None else self.tp)

    def local(self, name: str) -> tuple[int, ...]:
        """Shape of one rank's slice, padding included."""
        return self.table[name].local_shape(self.tp, self.padded_vocab)

    def check(self, weights: Weights) -> None:
        """Every parameter of the model is there with the shape that it should have, and no other."""
        have = {name for name, _ in weights}
        for name in sorted(have - set(self.table)):
            raise CheckpointError(f"{self.where}: {name} is no parameter of the model; check --model FILE.toml")
        for name, foreign in self.table.items():
            if name not in have:
                raise CheckpointError(
                    f"{self.where}: {name} of the model is missing ({foreign.name} there); check --model FILE.toml"
                )
            if foreign.vocabulary and self.padded_vocab < foreign.shape[0]:
                raise CheckpointError(
                    f"{self.where}: {name} has {self.padded_vocab} rows, the model's vocabulary {foreign.shape[0]}; "
                    "check --model FILE.toml or --vocab-size"
                )
            for rank in self.ranks(name):
                shape = tuple(weights[name, rank].shape)
                if shape != self.local(name):
                    raise CheckpointError(
                        f"{self.where}: {foreign.name} of tensor-parallel rank {rank} has shape {shape}; the model "
                        f"needs {self.local(name)} ({foreign.shape} over {self.tp} ranks); check --model FILE.toml"
                    )

    def piece(self, name: str, kind: str, rank: int, start: int, flat: torch.Tensor) -> StatePiece | None:
        """A flat range of one rank's slice as a piece of ours, padding cut off; None if it is all padding."""
        offset, shape = self.table[name].box(rank, self.tp, self.padded_vocab)
        length = min(start + flat.numel(), prod(shape)) - start
        if length <= 0:
            return None
        return StatePiece(
            name=name, kind=kind, global_shape=self.table[name].record.shape, offset=offset, shape=shape,
            flat_start=start, tensor=flat.reshape(-1)[:length],
        )


def _mapping(tree: Any, path: Path) -> dict[Any, Any]:
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: holds {type(tree).__name__} where a dict is expected; it is no checkpoint")
    return tree


def _count(value: Any) -> int:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    return int(value) if good else 0


def _layer_weights(files: MegatronFiles, content: Mapping[Path, Any]) -> tuple[dict[tuple[int, str], str], Weights]:
    tensors = {
        (layer, rank): {n: t for n, t in _mapping(content[path], path).items() if isinstance(t, torch.Tensor)}
        for layer, ranks in files.layers.items() for rank, path in ranks.items()
    }
    named = name_layers({layer: tensors[layer, 0] for layer in files.layers}, files.folder)
    weights: Weights = {}
    for (layer, there), ours in named.items():
        for rank, path in files.layers[layer].items():
            if there not in tensors[layer, rank]:
                raise CheckpointError(f"{path}: {there} is missing, which rank 0 has")
            weights[ours, rank] = tensors[layer, rank][there]
    return named, weights


def _whole_weights(files: MegatronFiles, content: Mapping[Path, Any]) -> Weights:
    weights: Weights = {}
    for rank, path in files.model.items():
        module = _mapping(content[path], path).get("module")
        if not isinstance(module, dict):
            raise CheckpointError(f"{path}: no weights in it, and there are no layer_*-model_states.pt beside it")
        for there, tensor in _flatten(module, ""):
            ours = name_without_pipeline(there)
            if ours is None:
                raise CheckpointError(f"{path}: {there} is no parameter of this model")
            weights[ours, rank] = tensor
    return weights


def _flatten(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor) and is_parameter(str(key)):
            yield f"{prefix}{key}", value


def _padded_vocab(weights: Weights, tp: int) -> int:
    first = weights.get(("embedding.word.weight", 0))
    return tp * first.shape[0] if first is not None and first.dim() == 2 else 0


def _weight_pieces(weights: Weights, layout: _Layout, note: Note) -> Iterator[StatePiece]:
    for name in layout.table:
        if layout.table[name].cat_dim is None:
            apart = [r for r in range(1, layout.tp) if not torch.equal(weights[name, 0], weights[name, r])]
            if apart:
                note(f"{name} differs between tensor-parallel ranks 0 and {apart[0]}; rank 0's is taken")
        for rank in layout.ranks(name):
            piece = layout.piece(name, "weight", rank, 0, weights[name, rank])
            if piece is not None:
                yield piece


_Fragments = dict[tuple[str, int], dict[int, dict[int, dict[str, torch.Tensor]]]]
"""(name, tensor-parallel rank) → stage → replica → kind → flat range."""


def _optimizer_pieces(
    shards: Mapping[tuple[int, int], Any], layers: Mapping[tuple[int, str], str], layout: _Layout
) -> tuple[list[StatePiece], int | None, float | None]:
    """Masters and moments from ZeRO-1 shards; how many updates they have seen, and the loss scale."""
    shard_ranges: _Fragments = {}
    steps: int | None = None
    scale: float | None = None
    for (replica, model_rank), file in sorted(shards.items()):
        where = f"{layout.where}: the shard of replica {replica}, model-parallel rank {model_rank}"
        try:
            state = file["optimizer_state_dict"]
            base, flats, mappings = (
                state[k] for k in ("base_optimizer_state", "single_partition_of_fp32_groups", "param_slice_mappings")
            )
            moments = base["state"]
            stage, tensor_rank = divmod(model_rank, layout.tp)
            for group, (flat, mapping) in enumerate(zip(flats, mappings, strict=True)):
                kinds = {"weight": flat, **{k: moments[group][k] for k in AdamW.KINDS if k in moments.get(group, {})}}
                if "step" in moments.get(group, {}):
                    steps = _count(moments[group]["step"])
                elif "step" in base["param_groups"][group]:
                    steps = _count(base["param_groups"][group]["step"])
                for there, address in mapping.items():
                    name = name_in_optimizer(there, layers)
                    if name is None:
                        raise CheckpointError(f"{where} has {there}, which no layer file has")
                    found = {k: _part(t, address, f"{where}: {k} of {there}") for k, t in kinds.items()}
                    shard_ranges.setdefault((name, tensor_rank), {}).setdefault(stage, {})[replica] = found
            scaler = state.get("loss_scaler")
            dynamic = isinstance(scaler, Stubbed) and scaler.name.endswith("DynamicLossScaler")  # fp16
            if dynamic and isinstance(scaler.get("cur_scale"), (int, float)):
                scale = float(scaler.get("cur_scale"))
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{where}: not as ZeRO-1 saves it ({type(error).__name__}: {error}); --weights-only leaves it out"
            ) from None
    return list(_join(shard_ranges, layout)) if shard_ranges else [], steps, scale


def _part(flat: torch.Tensor, address: Any, where: str) -> torch.Tensor:
    start, count = address.get("start"), address.get("numel")
    if not (isinstance(start, int) and isinstance(count, int) and 0 <= start <= start + count <= flat.numel()):
        raise CheckpointError(f"{where}: elements {start} + {count} of {flat.numel()}; it is damaged")
    return flat.reshape(-1).narrow(0, start, count)


def _join(shard_ranges: _Fragments, layout: _Layout) -> Iterator[StatePiece]:
    """Replica after replica holds the next range of a slice; a tied copy on a later stage is left out."""
    for name, foreign in layout.table.items():
        for rank in layout.ranks(name):
            stages = shard_ranges.get((name, rank))
            if stages is None:
                raise CheckpointError(f"{layout.where}: no optimizer shard holds {foreign.name} of tensor rank {rank}")
            parts = [p for _, p in sorted(stages[min(stages)].items())]
            for kind in parts[0]:
                start = 0
                for part in parts:
                    piece = layout.piece(name, kind, rank, start, part[kind])
                    start += part[kind].numel()
                    if piece is not None:
                        yield piece
                if start != prod(layout.local(name)):
                    raise CheckpointError(
                        f"{layout.where}: the optimizer shards hold {start} of {prod(layout.local(name))} elements of "
                        f"{foreign.name} on tensor rank {rank}"
                    )
