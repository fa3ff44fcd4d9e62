"""Import of Megatron-DeepSpeed checkpoints: layer files with tensor-parallel slices, and ZeRO-1 shards.

Nothing is computed: a slice of a tensor-parallel rank is a box of our tensor,
and a ZeRO fragment a flat range of one, which is what our format stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.state import StatePiece
from megatron_port.core.errors import CheckpointError
from megatron_port.core.optim.rules import AdamW
from megatron_port.tools.interop.commit import Imported
from megatron_port.tools.interop.megatron_files import (
    MegatronFiles,
    find_files,
    is_parameter,
    name_in_optimizer,
    name_layers,
    name_without_pipeline,
)
from megatron_port.tools.interop.megatron_model import model_from_args
from megatron_port.tools.interop.names import Foreign, megatron_names
from megatron_port.tools.interop.unpickle import Stubbed, read_pickles

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
