"""Is one layout's run another's? Named tolerances, and the first parameter that differs.

Tolerances (docs/parity.md): fp64 1e-9 on everything; fp32 1e-5 in the loss and
1e-4 in the gradient norm and in each gradient by name; bf16 and fp16 twice the
spread of the single process under reordered sums, measured by the caller.

A gradient's deviation is max|Δ| ÷ (rms of that gradient + 1e-3 × rms of all
gradients), so that a tensor that is small as a whole is not excused by large
ones. Key biases have no gradient in exact arithmetic (softmax does not see a
shift that is the same for all keys), so there is nothing to be relative to:
they get an absolute bound in units of the rms of all gradients, and are left
out when weights are compared, because Adam turns their rounding noise into
full-size steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_port.config.schema import ModelConfig
from megatron_port.train.trace import RankTrace, assemble, differing_copies


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted deviations, all relative (see the module's text)."""

    name: str
    loss: float
    grad_norm: float
    gradient: float
    key_bias: float
    """Gradient of key biases ÷ rms of all gradients."""
    weight: float | None = None
    """max|Δ| ÷ learning rate of the weights after the run; None: not compared."""

    def scaled(self, factor: float) -> Tolerance:
        """All bounds times ``factor``."""
        return Tolerance(
            f"{self.name} x {factor:g}", self.loss * factor, self.grad_norm * factor, self.gradient * factor,
            self.key_bias * factor, None if self.weight is None else self.weight * factor,
        )


FP64 = Tolerance("fp64", loss=1e-9, grad_norm=1e-9, gradient=1e-9, key_bias=1e-9, weight=1e-6)
FP32 = Tolerance("fp32", loss=1e-5, grad_norm=1e-4, gradient=1e-4, key_bias=1e-4)


@dataclass(frozen=True)
class Run:
    """A whole run, assembled from its ranks."""

    losses: tuple[float, ...]
    grad_norms: tuple[float | None, ...]
    eval_loss: float | None
    final_eval_loss: float | None
    gradients: tuple[dict[str, torch.Tensor], ...]
    weights: dict[str, torch.Tensor]
    differing_copies: tuple[str, ...]

    @classmethod
    def of(cls, traces: Sequence[RankTrace]) -> Run:
        """From every rank's trace. Raises ValueError when slices do not cover each tensor exactly once."""
        steps = max(len(t.gradients) for t in traces)
        return cls(
            losses=tuple(traces[0].losses),
            grad_norms=tuple(traces[0].grad_norms),
            eval_loss=traces[0].eval_loss,
            final_eval_loss=traces[0].final_eval_loss,
            gradients=tuple(assemble([t.gradients[s] for t in traces]) for s in range(steps)),
            weights=assemble([t.weights for t in traces]),
            differing_copies=tuple(differing_copies(traces)),
        )


@dataclass(frozen=True)
class Deviation:
    """The largest deviation of one kind, and the bound it is held to."""

    quantity: str
    where: str
    value: float
    bound: float

    @property
    def ok(self) -> bool:
        """Within the bound (NaN is not)."""
        return self.value <= self.bound

    def __str__(self) -> str:
        mark = "ok" if self.ok else "DIFFERS"
        return f"{self.quantity:<12} {self.value:9.2e}  bound {self.bound:8.1e}  {mark:<8} {self.where}"


def key_bias_rows(model: ModelConfig) -> torch.Tensor:
    """True for the rows of ``attention.qkv.bias`` that are key biases."""
    per_group, d = model.num_attention_heads // model.kv_heads + 2, model.head_size
    rows = torch.zeros(model.kv_heads, per_group, d, dtype=torch.bool)
    rows[:, -2] = True
    return rows.flatten()


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), 1e-30)


def _without_keys(name: str, t: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return t[~keys] if name.endswith("attention.qkv.bias") else t


def gradient_deviation(
    a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], model: ModelConfig
) -> tuple[tuple[float, str], tuple[float, str]]:
    """((largest deviation, name), (largest key-bias gradient ÷ rms of all, name)).

    Raises ValueError when the two runs have different parameters.
    """
    if a.keys() != b.keys():
        raise ValueError(f"the runs have different parameters: {sorted(a.keys() ^ b.keys())}")
    count = sum(g.numel() for g in a.values())
    rms_all = (sum(float(g.square().sum()) for g in a.values()) / max(count, 1)) ** 0.5
    keys = key_bias_rows(model)
    # With rotary embeddings a key bias is no longer the same shift for all keys.
    no_gradient = model.position_embedding == "learned"
    worst, worst_key = (0.0, "-"), (0.0, "-")
    for name, ga in a.items():
        gb = b[name]
        if no_gradient and name.endswith("attention.qkv.bias"):
            key = float(torch.maximum(ga[keys].abs().max(), gb[keys].abs().max())) / max(rms_all, 1e-300)
            if not key <= worst_key[0]:
                worst_key = (key, name)
            ga, gb = ga[~keys], gb[~keys]
        rms = float(ga.square().mean().sqrt())
        value = float((ga - gb).abs().max()) / max(rms + 1e-3 * rms_all, 1e-300)
        if not value <= worst[0]:
            worst = (value, name)
    return worst, worst_key


def compare(
    reference: Run, other: Run, tolerance: Tolerance, model: ModelConfig, *, lr: float = 0.0
) -> list[Deviation]:
    """Every kind of deviation with its bound; ``[d for d in … if not d.ok]`` are the failures."""
    out = []
    loss = [(_relative(x, y), f"step {i}") for i, (x, y) in enumerate(zip(reference.losses, other.losses))]
    out.append(Deviation("loss", max(loss)[1], max(v for v, _ in loss), tolerance.loss))
    norms = [
        (_relative(x, y) if x is not None and y is not None else (0.0 if x is y else float("inf")), f"step {i}")
        for i, (x, y) in enumerate(zip(reference.grad_norms, other.grad_norms))
    ]
    out.append(Deviation("grad norm", max(norms)[1], max(v for v, _ in norms), tolerance.grad_norm))
    if reference.eval_loss is not None and other.eval_loss is not None:
        out.append(Deviation("eval loss", "", _relative(reference.eval_loss, other.eval_loss), tolerance.loss))
    if reference.final_eval_loss is not None and other.final_eval_loss is not None:
        value = _relative(reference.final_eval_loss, other.final_eval_loss)
        out.append(Deviation("final eval", "", value, tolerance.loss))
    for step, (a, b) in enumerate(zip(reference.gradients, other.gradients)):
        (value, name), (key, key_name) = gradient_deviation(a, b, model)
        out.append(Deviation("gradient", f"step {step}, {name}", value, tolerance.gradient))
        if key_name != "-":
            out.append(Deviation("key bias", f"step {step}, {key_name}", key, tolerance.key_bias))
    if tolerance.weight is not None and lr > 0.0:
        keys = key_bias_rows(model)
        weights = [
            (float((_without_keys(n, w, keys) - _without_keys(n, other.weights[n], keys)).abs().max()) / lr, n)
            for n, w in reference.weights.items()
        ]
        value, name = max(weights)
        out.append(Deviation("weight / lr", name, value, tolerance.weight))
    for name in other.differing_copies:
        out.append(Deviation("copies", f"{name} differs between ranks", float("inf"), 0.0))
    return out


def spread(runs: Sequence[Run], model: ModelConfig, *, name: str, floor: Tolerance) -> Tolerance:
    """The largest pairwise deviation among reorderings of one process, never under ``floor``."""
    zero = Tolerance(name, 0.0, 0.0, 0.0, 0.0)
    loss = norm = gradient = key = 0.0
    for i, a in enumerate(runs):
        for b in runs[:i]:
            for d in compare(a, b, zero, model):
                if d.quantity in ("loss", "eval loss"):
                    loss = max(loss, d.value)
                elif d.quantity == "grad norm":
                    norm = max(norm, d.value)
                elif d.quantity == "gradient":
                    gradient = max(gradient, d.value)
                elif d.quantity == "key bias":
                    key = max(key, d.value)
    return Tolerance(
        name, max(loss, floor.loss), max(norm, floor.grad_norm), max(gradient, floor.gradient),
        max(key, floor.key_bias),
    )
