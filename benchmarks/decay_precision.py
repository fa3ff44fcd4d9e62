"""Does it matter that decays are in fp32? python benchmarks/decay_precision.py [--steps 200] --out FILE

The quick start's corpus (``megatron-port data fetch``, ``data prepare``), a small hybrid, bf16, one process, real
runs of ``megatron-port train``: as it is built; with the gradients of decays, and their sums, in bf16; with decays and
their sums in bf16, and then the gradients, too; and as it is built with other micro-batches, which changes
nothing but the order of sums.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from megatron_port.cli.main import main as megatron_port
from megatron_port.ext.mixers import recurrence
from megatron_port.ext.mixers.gated_delta import GatedDeltaSpec
from megatron_port.ext.mixers.recurrent_spec import unit

VARIANTS = {
    "as built": {}, "as built, other micro-batches": {"batch.micro_batch_size": 4},
    "gradients of decays in bf16": {}, "decays in bf16": {},
}
SHAPE = {
    "model.position_embedding": "rope", "model.normalization": "rmsnorm", "model.activation": "swiglu",
    "model.add_bias": "false", "model.num_layers": 3, "model.hidden_size": 64, "model.ffn_hidden_size": 176,
    "model.mixer_pattern": '["gated_delta", "gated_delta", "attention"]',
    "layout.tensor_parallel_size": 1, "layout.pipeline_parallel_size": 1, "layout.data_parallel_size": 1,
    "layout.zero_stage": 0, "batch.micro_batch_size": 8, "batch.global_batch_size": 8, "precision.dtype": "bf16",
    "training.eval_interval": 100, "training.eval_batches": 8, "training.log_interval": 50,
    "checkpoint.save_interval": 0,
}


class _Sums(torch.autograd.Function):
    """Sums of decays [..., C, n] over the positions of a chunk, with those of gradients in bf16."""

    @staticmethod
    def forward(ctx: Any, decays: torch.Tensor, narrow: bool) -> torch.Tensor:
        return (decays.bfloat16() if narrow else decays.double()).cumsum(-2).double()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.bfloat16().flip(-2).cumsum(-2).flip(-2).double(), None


class _Rounded(torch.autograd.Function):
    """Decays whose gradients are rounded to bf16, and they themselves where asked."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, narrow: bool) -> torch.Tensor:
        return x.bfloat16().to(x.dtype) if narrow else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.bfloat16().to(grad.dtype), None


class _Wide:
    """Decays that ``recurrence`` widens and sums."""

    def __init__(self, decays: torch.Tensor, narrow: bool) -> None:
        self.decays, self.narrow, self.dtype, self.shape = decays, narrow, decays.dtype, decays.shape
        self.device = decays.device

    def double(self) -> _Wide:
        """Leave them as they are."""
        return self

    def cumsum(self, dim: int) -> torch.Tensor:
        """Return the sums."""
        return _Sums.apply(self.decays, self.narrow)


def narrow_decays(variant: str) -> None:
    """Let the recurrence of this process compute decays as a variant does."""
    if "decays in bf16" not in variant:
        return
    narrow, decays, operands = variant == "decays in bf16", recurrence._decays, GatedDeltaSpec.operands

    def rounded(self: GatedDeltaSpec, rows: Any, own: Any) -> recurrence.Operands:
        found = operands(self, rows, own)
        found.__dict__["decay"] = _Rounded.apply(found.decay, narrow)
        return found

    recurrence._decays = lambda g, starts: decays(_Wide(g, narrow), starts)
    GatedDeltaSpec.operands = rounded


def gradients(dtype: torch.dtype, variant: str) -> dict[str, torch.Tensor]:
    """Return the gradients of A's logarithm and of the decays' bias of eight heads over 2048 random positions."""
    narrow, generator = variant == "decays in bf16", torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(1, 8, 2048, *shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v, forget, rate = unit(drawn(32)), unit(drawn(32)), drawn(32), drawn(), drawn().sigmoid()
    # From heads that forget at once to those that remember the whole of it.
    own = {"decay": torch.linspace(-7, 2.5, 8), "decay_bias": torch.ones(8)}
    own = {name: x.to(dtype)[:, None].requires_grad_() for name, x in own.items()}
    decay = -own["decay"].exp() * torch.nn.functional.softplus(forget + own["decay_bias"])
    plain = recurrence._decays
    if variant != "as built":
        decay, recurrence._decays = _Rounded.apply(decay, narrow), lambda g, starts: plain(_Wide(g, narrow), starts)
    try:
        operands = recurrence.Operands(q * 32**-0.5, k, v, decay, rate)
        out, _ = recurrence.in_chunks(operands, recurrence.zero_state(operands), chunk=64)
        (out * drawn(32)).sum().backward()
    finally:
        recurrence._decays = plain
    return {name: x.grad.double().flatten() for name, x in own.items()}


def errors() -> dict[str, dict[str, list[float]]]:
    """Return how far each head's gradients are from fp64's, relative to them."""
    exact = gradients(torch.float64, "as built")
    found = {variant: gradients(torch.float32, variant) for variant in VARIANTS if "other" not in variant}
    return {variant: {name: [float(f"{x:.2g}") for x in ((g - exact[name]) / exact[name]).abs().tolist()]
                      for name, g in given.items()} for variant, given in found.items()}


def losses(variant: str, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Train, and return the losses by step."""
    settings = {**SHAPE, **VARIANTS[variant], "name": variant.replace(" ", "-").replace(",", ""), "output_dir": folder,
                "training.steps": args.steps, "optimizer.decay_steps": args.steps}
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    subprocess.run(
        [sys.executable, __file__, "--variant", variant, "train", "runs/quickstart", "--data", args.data, *sets],
        check=True, stdout=sys.stderr, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    rows = [json.loads(line) for line in (Path(folder) / settings["name"] / "metrics.jsonl").read_text().splitlines()]
    training = [row["loss"] for row in rows if "loss" in row]
    held_out = {row["step"]: round(row["validation_loss"], 5) for row in rows if "validation_loss" in row}
    return {"validation_loss": held_out, "training_loss": [round(sum(training[i : i + 10]) / 10, 5)
                                                           for i in range(0, len(training) - 9, 10)]}


def main() -> int:
    """Train each variant and write the curves."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--data", default="data/quickstart")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(len(VARIANTS)) as pool:
        found = dict(zip(VARIANTS, pool.map(lambda variant: losses(variant, args, folder), VARIANTS)))
    args.out.write_text(json.dumps({
        "what": "losses of a hybrid in bf16, by the precision of its decays; training losses are means of ten steps",
        "command": "python benchmarks/decay_precision.py " + " ".join(sys.argv[1:]),
        "torch": torch.__version__, "machine": platform.processor() or platform.machine(), "settings": SHAPE,
        "error_of_gradients_by_head": errors(), "curves": found,
    }, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--variant"]:
        narrow_decays(sys.argv[2])
        sys.exit(megatron_port(sys.argv[3:]))
    sys.exit(main())
