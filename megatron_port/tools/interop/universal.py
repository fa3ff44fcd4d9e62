"""Export to DeepSpeed's Universal checkpoint, which any layout of a DeepSpeed model loads.

::

    OUT/latest_universal                        "global_step120"
    OUT/global_step120/mp_rank_00_model_states.pt   counters, no weights
    OUT/global_step120/zero/optimizer_state.pt
    OUT/global_step120/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt

``NAME`` is the parameter's name in the model that will load it: Megatron-DeepSpeed's
(``names``) or ours. One tensor of one kind is in memory at a time. The files are
``torch.save``'s, and hold only tensors, numbers, strings, lists and dicts: they read
with ``weights_only=True``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_port.core.checkpoint.reader import Checkpoint
from megatron_port.core.checkpoint.shard import write_text
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.record import BUFFER, ParameterRecord, StatePiece
from megatron_port.core.errors import CheckpointError
from megatron_port.core.model.shapes import buffer_shapes, model_records, parameter_shapes
from megatron_port.core.optim.rules import AdamW
from megatron_port.run.build import state_records
from megatron_port.run.saved_model import model_of
from megatron_port.tools.interop.dcp import Imported, building, tagged_folder, whole
from megatron_port.tools.interop.sidecar import read_sidecar, write_sidecar
from megatron_port.tools.interop.unpickle import check_torch_file, first_line

# Our names and shapes beside Megatron-DeepSpeed's.
#
# There a model is a ``PipelineModule`` whose layers are numbered: 0 casts its
# input, 1 is the embedding, 2 to L+1 are the transformer layers, L+2 is the final
# norm and L+3 the head (microsoft/Megatron-DeepSpeed since 2023). A parameter's
# name is its layer's number and its name in the layer; tied embeddings are
# ``tied_modules.embed.*``. BigScience's fork has two transposing layers more; see
# ``megatron_files``, which finds the layers by what they hold.
#
# The fused query-key-value rows are in our order there (checkpoint version 2 and
# later): by key/value group, its queries, its key, its value.

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
    """Canonical name → :class:`Foreign`, for every parameter of ``model``. CheckpointError: Megatron-DeepSpeed has no
    such parameters."""
    if model.attention_gate:
        raise CheckpointError("model.attention_gate: Megatron-DeepSpeed's attention has no gates")
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


DEEPSPEED_VERSION = "0.19.8"
"""The version whose loader this was checked with; loaders ask that it be 0.3.17 or later."""
UNIVERSAL_VERSION = 0.2
KINDS = {"weight": "fp32", **{kind: kind for kind in AdamW.KINDS}}
"""Kind → file; DeepSpeed's format knows Adam alone."""
_GROUPS = 8


def export_universal(checkpoint: Checkpoint, out: Path, *, names: str = "megatron") -> Path:
    """Write ``checkpoint`` to the new folder ``out``, which is what DeepSpeed's ``load_checkpoint`` takes.

    ``names``: ``megatron`` or ``canonical``. A buffer, which only canonical names have, is a parameter without moments.

    Raises:
        CheckpointError: the source is damaged or has no moments, ``out`` exists, or the disk is full or refuses.
    """
    missing = [kind for kind in KINDS if kind not in checkpoint.kinds()]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} has no {' or '.join(missing)}: a Universal checkpoint needs weights and both moments"
        )
    for name in checkpoint.names():
        lacking = [kind for kind in KINDS if name not in set(checkpoint.names(kind))]
        if lacking:
            raise CheckpointError(
                f"{checkpoint.path}: {name} has no {' or '.join(lacking)}, as its optimizer gives it other state: a "
                "Universal checkpoint holds both moments of every parameter; export to torch's format (--to dcp)"
            )
    state = checkpoint.manifest.state
    model = model_of(dict(state.config), str(checkpoint.path))
    if names == "megatron" and model.shared_layers > 1:
        raise CheckpointError(
            f"{checkpoint.path}: layers share weights, and Megatron-DeepSpeed's each have their own; export to hf, "
            "dcp, or universal with --names canonical"
        )
    table = megatron_names(model) if names == "megatron" else canonical_names(model)
    kinds = {name: tuple(KINDS) for name in checkpoint.names()} | dict.fromkeys(checkpoint.names(BUFFER), (BUFFER,))
    unknown = [name for name in kinds if name not in table]
    if unknown:
        raise CheckpointError(f"{checkpoint.path}: {unknown[0]} is not a parameter of the model in its configuration")
    steps = int(checkpoint.scalars.get("optimizer_steps", checkpoint.step))
    needed = 4 * sum(prod(checkpoint.shape(name, kind)) for name, each in kinds.items() for kind in each)
    with building(out, needed) as part:
        tag = f"global_step{state.step}"
        folder = part / tag
        (folder / "zero").mkdir(parents=True)
        for name, each in kinds.items():
            _write_parameter(checkpoint, name, each, folder / "zero" / table[name].name, table[name], steps)
        torch.save(_optimizer_state(), folder / "zero" / "optimizer_state.pt")
        torch.save(_model_states(checkpoint, names), folder / "mp_rank_00_model_states.pt")
        write_sidecar(folder, checkpoint, names)
        write_text(part / "latest_universal", tag)
    return out


def _write_parameter(
    checkpoint: Checkpoint, name: str, kinds: tuple[str, ...], folder: Path, foreign: Foreign, steps: int
) -> None:
    folder.mkdir()
    for kind in kinds:
        shape = checkpoint.shape(name, kind)
        tensor = checkpoint.read(name, kind, (0,) * len(shape), shape).reshape(foreign.shape)
        # The keys are DeepSpeed's (deepspeed/checkpoint/constants.py): how a rank of any tp cuts its slice out of it.
        entry: dict[str, Any] = {"param": tensor.float(), "cat_dim": foreign.cat_dim or 0}
        if foreign.vocabulary:
            entry["vocab_tensor"] = True
        if foreign.parts > 1:
            entry["param_n_sub_params"] = foreign.parts
        torch.save(entry, folder / f"{KINDS.get(kind, 'fp32')}.pt")
    # A 0-dim integer tensor: torch's optimizers add to it in place, DeepSpeed's use it as an integer.
    torch.save(torch.tensor(steps), folder / "step.pt")


def _optimizer_state() -> dict[str, Any]:
    # DeepSpeed copies what these groups hold over its own: empty ones leave learning rate and decay as configured.
    # It walks both lists in step and stops at the shorter one, so there are more than any engine has.
    return {"ds_version": DEEPSPEED_VERSION, "param_groups": [{} for _ in range(_GROUPS)]}


def _model_states(checkpoint: Checkpoint, names: str) -> dict[str, Any]:
    state = checkpoint.manifest.state
    patterns = {"universal_checkpoint_version": UNIVERSAL_VERSION}
    return {
        "module": None, "optimizer": None, "lr_scheduler": None, "ds_version": DEEPSPEED_VERSION,
        "dp_world_size": 1, "mp_world_size": 1, "skipped_steps": int(state.extra.get("skipped_total", 0)),
        "global_steps": state.step, "global_samples": state.samples, "universal_checkpoint_info": patterns,
        # Megatron-DeepSpeed's own: what its load_checkpoint asks for.
        "iteration": state.step, "checkpoint_version": 3.0, "tokens": state.tokens, "names": names,
    }


# Import of DeepSpeed Universal checkpoints: ours, and those that ``ds_to_universal`` made of Megatron-DeepSpeed's.
#
# Files are read with ``weights_only=True`` and as memory maps; nothing is unpickled
# but tensors and plain values.

def universal_folder(source: Path) -> Path | None:
    """The folder with ``zero/`` in it: ``source`` or what its ``latest_universal`` names; None if there is none."""
    return tagged_folder(source, "latest_universal", lambda folder: (folder / "zero").is_dir())


def read_universal(folder: Path, model: ModelConfig | None = None) -> Imported:
    """Read ``folder/zero/NAME/*.pt``, named as Megatron-DeepSpeed or as we name parameters.

    Raises:
        CheckpointError: files are missing, damaged or hold more than tensors, or tensors do not fit the model.
    """
    sidecar = read_sidecar(folder)
    model = model or model_of(sidecar.config if sidecar else {}, str(folder))
    present = {p.name for p in (folder / "zero").iterdir() if p.is_dir()}
    canonical = sidecar.names == "canonical" if sidecar else set(parameter_shapes(model)) <= present
    table, buffers = canonical_names(model) if canonical else megatron_names(model), buffer_shapes(model)
    extra = sorted(present - {foreign.name for foreign in table.values()})
    if extra:
        raise CheckpointError(f"{folder / 'zero' / extra[0]}: no parameter of the model; give its --model FILE.toml")
    pieces: list[StatePiece] = []
    steps: set[int] = set()
    for ours, foreign in table.items():
        place = folder / "zero" / foreign.name
        if not place.is_dir():
            raise CheckpointError(f"{place} is missing: {ours} of the model has no tensors; give its --model FILE.toml")
        for kind, file in ({BUFFER: "fp32"} if ours in buffers else KINDS).items():
            path = place / f"{file}.pt"
            if path.is_file():
                pieces.append(whole(ours, kind, foreign.record.shape, _tensor(path, foreign)))
        if (place / "step.pt").is_file():
            steps.add(_integer(load_plain(place / "step.pt"), place / "step.pt"))
    if len(steps) > 1:
        raise CheckpointError(f"{folder}: parameters have taken different numbers of steps: {sorted(steps)[:5]}")
    if sidecar is not None:
        return Imported(
            model=model, pieces=pieces, step=sidecar.step, samples=sidecar.samples, tokens=sidecar.tokens,
            scalars=sidecar.scalars, config=sidecar.config, extra=sidecar.extra,
        )
    step, samples = _counters(folder)
    return Imported(model=model, pieces=pieces, step=step, samples=samples,
                    optimizer_steps=steps.pop() if steps else None)


def load_plain(path: Path) -> Any:
    """A ``torch.save`` file of tensors and plain values, mapped. Raises CheckpointError if it is not one."""
    try:
        check_torch_file(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # torch's readers raise many kinds
        why = f"damaged, or it holds objects and not only tensors: {first_line(error)}"
        raise CheckpointError(f"{path}: {why}") from None


def _tensor(path: Path, foreign: Foreign) -> torch.Tensor:
    """The parameter's tensor, row-major as ours, the vocabulary's padding cut off."""
    entry = load_plain(path)
    tensor = entry.get("param") if isinstance(entry, dict) else None
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{path}: no tensor called \"param\" in it")
    shape = tuple(tensor.shape)
    if foreign.vocabulary and len(shape) == 2 and shape[0] > foreign.shape[0] and shape[1] == foreign.shape[1]:
        tensor = tensor[: foreign.shape[0]]
        shape = tuple(tensor.shape)
    if shape != foreign.shape and not (len(shape) == 1 and shape[0] == prod(foreign.shape)):
        raise CheckpointError(
            f"{path}: shape {shape}; {foreign.record.name} of the model needs {foreign.shape}; check --model FILE.toml"
        )
    return tensor


def _integer(value: Any, path: Path) -> int:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, (int, float)) or int(value) != value or value < 0:
        raise CheckpointError(f"{path}: {value!r:.80} is no number of steps")
    return int(value)


def _counters(folder: Path) -> tuple[int, int]:
    """Steps and samples from the first ``mp_rank_*`` file that can be read as plain values; (0, 0) without one."""
    for path in sorted(folder.glob("mp_rank_*_model_states.pt")):
        try:
            state = load_plain(path)
        except CheckpointError:
            continue
        if isinstance(state, dict):
            return int(state.get("global_steps") or 0), int(state.get("global_samples") or 0)
    return 0, 0
