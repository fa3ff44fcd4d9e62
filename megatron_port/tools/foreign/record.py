"""Records of one process of a trainer on disk: losses, norms, gradients, weights, outputs of modules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

STEPS = 2
"""The second shows gradients that were not cleared."""


@dataclass(frozen=True)
class Part:
    """The part of a tensor that a rank has."""

    value: Tensor
    index: Tensor
    """[shape of ``value``]: see ``foreign.placement``."""


@dataclass(frozen=True)
class Output:
    """A tensor that a module returned, in the order in which modules end."""

    module: str
    call: int
    """From 0, within the step."""
    part: int
    """Which of the tensors that it returned."""
    value: Tensor


@dataclass
class Record:
    """Results of one process."""

    rank: int
    losses: list[float | None] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    gradients: list[dict[str, Part]] = field(default_factory=list)
    """By step and name. A name without a gradient is in ``absent``."""
    absent: list[list[str]] = field(default_factory=list)
    weights: list[dict[str, Part]] = field(default_factory=list)
    """Before the first step, and after each."""
    outputs: list[Output] = field(default_factory=list)
    """Outputs of the first step's forward pass."""

    def write(self, folder: Path) -> None:
        """Write two files."""
        tensors: dict[str, Tensor] = {}
        known: dict[tuple[Any, ...], str] = {}

        def put(value: Tensor) -> str:
            value = value.detach().cpu().contiguous()
            sign = (str(value.dtype), tuple(value.shape), value.numpy().tobytes()) if value.dtype == torch.int64 else ()
            if sign in known and sign:
                return known[sign]
            key = f"t{len(tensors)}"
            tensors[key] = value.clone()
            if sign:
                known[sign] = key
            return key

        def table(parts: Mapping[str, Part]) -> dict[str, list[str]]:
            return {name: [put(part.value), put(part.index)] for name, part in parts.items()}

        meta = {
            "rank": self.rank, "losses": self.losses, "norms": self.norms, "absent": self.absent,
            "gradients": [table(step) for step in self.gradients], "weights": [table(step) for step in self.weights],
            "outputs": [[o.module, o.call, o.part, put(o.value)] for o in self.outputs],
        }
        save_file(tensors, str(folder / f"rank-{self.rank:05d}.safetensors"))
        (folder / f"rank-{self.rank:05d}.json").write_text(json.dumps(meta))


def read(folder: Path, rank: int) -> Record:
    """Return what a process has written."""
    meta = json.loads((folder / f"rank-{rank:05d}.json").read_text())
    tensors = load_file(str(folder / f"rank-{rank:05d}.safetensors"))

    def parts(table: Mapping[str, list[str]]) -> dict[str, Part]:
        return {name: Part(tensors[value], tensors[index]) for name, (value, index) in table.items()}

    return Record(
        rank=meta["rank"], losses=meta["losses"], norms=meta["norms"], absent=meta["absent"],
        gradients=[parts(step) for step in meta["gradients"]],
        weights=[parts(step) for step in meta["weights"]],
        outputs=[Output(module, call, part, tensors[key]) for module, call, part, key in meta["outputs"]],
    )
