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

from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_port.core.checkpoint.disk import write_text
from megatron_port.core.checkpoint.reader import Checkpoint
from megatron_port.core.dist.state import BUFFER
from megatron_port.core.errors import CheckpointError
from megatron_port.core.optim.rules import AdamW
from megatron_port.tools.interop.folder import building
from megatron_port.tools.interop.names import Foreign, canonical_names, megatron_names
from megatron_port.tools.interop.sidecar import model_of, write_sidecar

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
