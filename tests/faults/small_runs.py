"""The small runs that the fault tests break: their command lines, and what is looked for in their folders."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_port.core.checkpoint.reader import checkpoints_in, open_checkpoint

RUN_FILE = """
engine = "native"
[model]
num_layers = 2
hidden_size = 64
num_attention_heads = 4
vocab_size = 8000
seq_length = 32
hidden_dropout = 0.1
[layout]
zero_stage = 1
vocab_padding_multiple = 8
[batch]
micro_batch_size = 1
global_batch_size = 4
[precision]
dtype = "fp32"
[optimizer]
lr = 1e-3
warmup_steps = 2
decay_steps = 1000
[data]
synthetic = true
tokenizer = "byte"
[backend]
device = "cpu"
attention = "math"
"""

EXPERTS = (
    "model.moe.num_experts=8", "model.moe.ffn_hidden_size=64", "model.moe.balance_bias=true",
    "model.moe.balance_loss=previous_step", "model.moe.capacity_factor=1.25",
)
"""What a layout with ``ep`` trains: routers with both buffers, and tokens that are dropped."""


@dataclass(frozen=True)
class Layout:
    """A layout by its sizes; ``ranks`` processes."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 0
    """0: a model without experts."""

    @property
    def ranks(self) -> int:
        """tp x pp x dp."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp} dp{self.dp}" + (f" ep{self.ep}" if self.ep else "")

    def sets(self) -> tuple[str, ...]:
        """What ``--set`` takes."""
        experts = (f"layout.expert_parallel_size={self.ep}", *EXPERTS) if self.ep else ()
        return (
            *experts,
            f"layout.tensor_parallel_size={self.tp}", f"layout.pipeline_parallel_size={self.pp}",
            f"layout.data_parallel_size={self.dp}", f"layout.sequence_parallel={'true' if self.tp > 1 else 'false'}",
        )


class Run:
    """A run folder under ``home/runs`` and the command that trains in it."""

    def __init__(self, home: Path, name: str, layout: Layout, *sets: str, steps: int) -> None:
        self.home, self.name, self.layout, self.sets, self.steps = home, name, layout, sets, steps
        home.mkdir(parents=True, exist_ok=True)
        file = home / "run.toml"
        if not file.exists():
            file.write_text(RUN_FILE)

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return self.home / "runs" / self.name

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.folder / "checkpoints"

    def command(self) -> list[str]:
        """The command that starts or resumes the run."""
        values = (
            f"output_dir={self.home / 'runs'}", f"name={self.name}", f"training.steps={self.steps}",
            *self.layout.sets(), *self.sets,
        )
        options = [part for value in values for part in ("--set", value)]
        return ["train", str(self.home / "run.toml"), "--nproc", str(self.layout.ranks), *options]

    def rows(self) -> list[dict[str, Any]]:
        """Whole lines of metrics.jsonl; a line that a kill cut is left out."""
        path, out = self.folder / "metrics.jsonl", []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                out.append(json.loads(line))
            except ValueError:
                continue
        return out

    def steps_done(self) -> list[dict[str, Any]]:
        """The rows of steps (not of evaluations)."""
        return [row for row in self.rows() if "loss" in row]

    def committed(self) -> int:
        """Step of the newest whole checkpoint, every file of it hashed; 0: none."""
        found = checkpoints_in(self.checkpoints)
        if not found:
            return 0
        open_checkpoint(found[0][0]).verify()
        return found[0][1].state.step

    def saving(self, since: float = 0.0) -> int:
        """The step whose save is under way: ``step-N.eE.tmp`` newer than every committed one; 0: none.

        Retention renames what it deletes to ``.tmp`` too, but those are older. ``since``: seconds since 1970; what has
        not changed after it is a leftover of an earlier save that was broken.
        """
        try:
            names = [p.name for p in self.checkpoints.iterdir() if p.suffix != ".tmp" or p.stat().st_mtime >= since]
        except OSError:
            return 0
        whole = [int(m.group(1)) for n in names if (m := re.fullmatch(r"step-(\d+)", n))]
        under_way = [int(m.group(1)) for n in names if (m := re.fullmatch(r"step-(\d+)(?:\.e\d+)?\.tmp", n))]
        return max((n for n in under_way if n > max(whole, default=-1)), default=0)


def trajectory(rows: list[dict[str, Any]]) -> dict[int, tuple[Any, ...]]:
    """Step → (loss, gradient norm, learning rate, samples, tokens) as the file has them: equal means equal bits."""
    return {
        row["step"]: tuple(row.get(k) for k in ("loss", "grad_norm", "learning_rate", "samples", "tokens"))
        for row in rows
    }


def resumed_at(output: str) -> int | None:
    """Return the step that a command's log says it resumed from; 0: it began anew; None: it did not get so far."""
    if found := re.search(r"^resumed from .* at step (\d+),", output, re.M):
        return int(found.group(1))
    return 0 if re.search(r"; model built in ", output) else None


def saved_steps(output: str) -> list[int]:
    """Steps that a command's log reports as committed."""
    return [int(n) for n in re.findall(r"^saved \S*step-(\d+)", output, re.M)]
