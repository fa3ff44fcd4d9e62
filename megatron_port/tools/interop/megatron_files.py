"""Files of a Megatron-DeepSpeed checkpoint, and what each layer file is.

::

    layer_03-model_01-model_states.pt               pipeline layer 3, tensor-parallel rank 1
    mp_rank_00_model_states.pt                      arguments and counters (without a pipeline also the weights)
    bf16_zero_pp_rank_0_mp_rank_05_optim_states.pt  ZeRO-1 shard of replica 0 on model-parallel rank 5

Model-parallel ranks count tensor-parallel ranks first: rank = stage * tp + tensor rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_port.core.errors import CheckpointError
from megatron_port.tools.interop.folder import tagged_folder
from megatron_port.tools.interop.names import canonical_of

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
