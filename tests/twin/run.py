"""The loop: schedule, batches, updates in float64, evaluations, and a line for each of metrics.jsonl.

``python -m twin.run RUN.json`` (in tests/) prints the lines; the file has the tables and keys of a run file.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twin import data, streams
from twin.model import Drop, Shape, Weights, initial, no_dropout, operations, parameters_of, token_losses
from twin.update import Adam, Average, Clipping


def learning_rate(optimizer: dict[str, Any], step: int) -> float:
    """Of the update number ``step``, from 0: a line up to ``lr`` at step ``warmup_steps``, then half a cosine; under
    ``wsd`` nothing, and one minus the root of a line over the last ``wsd_steps``."""
    warmup, end, low, high = (optimizer[k] for k in ("warmup_steps", "decay_steps", "min_lr", "lr"))
    if step < warmup:
        return high * (step + 1) / (warmup + 1)
    if optimizer["decay"] == "wsd":
        left = min(end - step, optimizer["wsd_steps"]) / optimizer["wsd_steps"]
        return low + (high - low) * (1 - math.sqrt(1 - max(left, 0.0)))
    turn = min(1.0, (step - warmup) / (end - warmup))
    return low + (high - low) * (1 + math.cos(math.pi * turn)) / 2


def batch_size(batch: dict[str, Any], consumed: int) -> int:
    """Samples of the step that begins after ``consumed`` of them."""
    first, last, ramp = batch["rampup_start"], batch["global_batch_size"], batch["rampup_samples"]
    stages = (last - first) // batch["rampup_increment"]
    return last if consumed >= ramp else first + batch["rampup_increment"] * (consumed * stages // ramp)


class Twin:
    """A run, from the tables of its run file."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.seed = config, config["seed"]
        self.model: Shape = parameters_of(config["model"])
        d = config["data"]
        self.train, self.valid = data.datasets(d["train"], d["weights"], d["split"], self.model.seq_length)
        self.eod = 256 if d["mask_eod_loss"] else None  # of the byte tokenizer
        self.weights = {k: v.double() for k, v in initial(self.model, self.seed).items()}
        self.adam = Adam(config["optimizer"], self.model.width)
        self.clip, self.average = Clipping(config["optimizer"]), Average(config["optimizer"].get("ema_decay", 0.0))
        self.lines: list[dict[str, float]] = []

    def losses(self, rows: list[data.Row], drop: Drop = no_dropout, z: float = 0.0) -> tuple[Tensor, float]:
        """(sum of the token losses that count, how many count). ``z``: factor of log² of the softmax's denominator."""
        both = np.stack([row.tokens for row in rows])
        settings = self.config["data"]
        within = settings.get("attention_documents") == "within"
        mask = data.loss_mask(both[:, :-1], self.eod)
        tokens, labels = torch.from_numpy(both[:, :-1].copy()), torch.from_numpy(both[:, 1:].copy())
        starts = torch.tensor([row.starts for row in rows]) if within else None
        reset = settings.get("position_reset", False)
        losses = token_losses(tokens, labels, self.weights, self.model, drop, starts, reset, z)
        return (losses * torch.from_numpy(mask)).sum(), float(mask.sum())

    def gradients(self, step: int, samples: list[int]) -> tuple[float, Weights]:
        """(mean loss, its gradient by name) of a training step."""
        def drop(x: Tensor, op: str, p: float) -> Tensor:
            if p == 0.0:
                return x
            return x * streams.dropout_factors(self.seed, step, samples, op, tuple(x.shape[1:]), p).to(x.dtype)

        for w in self.weights.values():
            w.requires_grad_()
        z = self.config["training"].get("z_loss", 0.0)
        total, count = self.losses([self.train.drawn(self.seed, k) for k in samples], drop, z)
        mean = total / count
        found = torch.autograd.grad(mean, list(self.weights.values()))
        for w in self.weights.values():
            w.requires_grad_(False)
        return float(mean.detach()), {name: g.clone() for name, g in zip(self.weights, found)}

    @torch.no_grad()
    def evaluate(self, step: int) -> None:
        """Add an evaluation's line: the same samples each time, in stored order, every token weighs the same."""
        size = self.config["batch"]["global_batch_size"]
        samples = min(self.config["training"]["eval_batches"] * size, self.valid.size)
        trained, averaged = self.weights, self.average.weights
        if self.config["optimizer"].get("ema_evaluate") and averaged:
            self.weights = averaged
        total, count = self.losses([self.valid.stored(k) for k in range(samples)])
        self.weights = trained
        self.lines.append({"step": step, "validation_loss": float(total) / count})

    def scores(self) -> float:
        """Scores of a sample: seq², or the mean of Σ ℓ² over the documents' parts of the run's first samples."""
        if self.config["data"].get("attention_documents") != "within":
            return self.model.seq_length**2
        rows = [self.train.drawn(self.seed, k).starts for k in range(min(512, self.train.size))]
        return sum(row.count(start) ** 2 for row in rows for start in set(row)) / len(rows)

    def run(self) -> list[dict[str, float]]:
        """Every line of metrics.jsonl, with operations and tokens of the step in place of what is per second."""
        c, m, training = self.config, self.model, self.config["training"]
        consumed, needed = 0, operations(m, self.scores())
        self.evaluate(0)
        for step in range(training["steps"]):
            size = batch_size(c["batch"], consumed)
            lr = learning_rate(c["optimizer"], step)
            loss, gradients = self.gradients(step, list(range(consumed, consumed + size)))
            norm = self.clip(gradients)
            self.adam.step(self.weights, gradients, lr)
            if self.average.decay:
                self.average.update(self.weights)
            consumed += size
            again = {"none": 0.0, "full": needed - 2 * m.seq_length * m.vocab_size * m.hidden_size}
            self.lines.append({
                "step": step + 1, "loss": loss, "learning_rate": lr, "grad_norm": norm, "loss_scale": 1.0,
                "skipped": False, "skipped_total": 0, "anomalies_total": 0, "samples": consumed,
                "tokens": consumed * m.seq_length, "step_tokens": size * m.seq_length,
                "model_operations": 3 * needed * size,
                "hardware_operations": (3 * needed + again[c["activations"]["policy"]]) * size,
            })
            if (step + 1) % training["eval_interval"] == 0 or step + 1 == training["steps"]:
                self.evaluate(step + 1)
        return self.lines


def main() -> None:
    """Print a run's lines."""
    for line in Twin(json.loads(Path(sys.argv[1]).read_text())).run():
        print(json.dumps(line))


if __name__ == "__main__":
    main()
