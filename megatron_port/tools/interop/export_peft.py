"""Export of a checkpoint's adapters as a folder that PEFT loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_port.core.checkpoint.disk import write_text
from megatron_port.core.checkpoint.reader import Checkpoint
from megatron_port.core.dist.state import WEIGHT, StateReader
from megatron_port.core.errors import CheckpointError
from megatron_port.ext.weights.adapter_reader import lengths_of, read_rows
from megatron_port.ext.weights.adapter_spec import MAGNITUDE, A, B
from megatron_port.tools.interop.folder import building
from megatron_port.tools.interop.hf_config import family_for
from megatron_port.tools.interop.peft import CONFIG, FILE, PREFIX, PeftModule, peft_config, peft_modules
from megatron_port.tools.interop.sidecar import model_of, tuning_of


def export_peft(checkpoint: Checkpoint, out: Path, base: Callable[[], StateReader]) -> str:
    """Write the adapters of ``checkpoint`` to the new folder ``out``; return the family that their names are of.

    ``base``: opens the frozen weights, whose row lengths DoRA needs where a fused matrix has rows without adapter.

    Raises:
        CheckpointError: it holds no adapters, no architecture computes the model, or ``out`` exists.
    """
    config, where = checkpoint.manifest.state.config, str(checkpoint.path)
    model, tuning = model_of(config, where), tuning_of(config, where)
    if not tuning.enabled:
        raise CheckpointError(f"{where} holds a whole model and no adapters; export it --to hf")
    family = family_for(model)
    modules = list(peft_modules(model, tuning, family))
    tensors = {
        f"{PREFIX}{module.name}.{name}": tensor
        for module in modules for name, tensor in _tensors(module, checkpoint.read, base).items()
    }
    with building(out, sum(t.nbytes for t in tensors.values())) as part:
        save_file(tensors, part / FILE, metadata={"format": "pt"})
        write_text(part / CONFIG, json.dumps(peft_config(modules, model, tuning, family), indent=2) + "\n")
    return family


def _tensors(module: PeftModule, read: StateReader, base: Callable[[], StateReader]) -> dict[str, torch.Tensor]:
    """Return a module's tensors by their last names."""
    spec, rank = module.spec, module.spec.rank
    a = [read(module.name_of(part, A), WEIGHT, (0, 0), (rank, spec.linear.inputs)) for part in module.parts]
    b = torch.zeros(module.rows, rank * len(module.parts), dtype=a[0].dtype)
    lengths = torch.zeros(module.rows, dtype=a[0].dtype)
    for run in module.runs:
        there = slice(run.theirs, run.theirs + run.count)
        if run.part in module.parts:
            column = module.parts.index(run.part) * rank
            b[there, column : column + rank] = read(
                module.name_of(run.part, B), WEIGHT, (run.ours, 0), (run.count, rank)
            )
        if spec.with_magnitude and run.part in module.parts:
            lengths[there] = read(module.name_of(run.part, MAGNITUDE), WEIGHT, (run.ours,), (run.count,))
        elif spec.with_magnitude:
            lengths[there] = lengths_of(read_rows(base(), module.weight, spec, run.whole, run.count)).float()
    out = {"lora_A.weight": torch.cat(a), "lora_B.weight": b}
    return out | {"lora_magnitude_vector": lengths} if spec.with_magnitude else out
