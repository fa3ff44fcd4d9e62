"""Is one layout's run another's? The measures, their bounds, and the first parameter that differs.

The bounds are here and nowhere else: the command, the tests and the fuzzer read them, and docs/parity.md says what they
rest on (a test compares its tables with these constants).

A gradient's deviation is max|Δ| ÷ (rms of that gradient + 1e-3 × rms of all
gradients), so that a tensor that is small as a whole is not excused by large
ones. Key biases have no gradient in exact arithmetic (softmax does not see a
shift that is the same for all keys), so there is nothing to be relative to:
they get an absolute bound, and are left
out when weights are compared, because Adam turns their rounding noise into
full-size steps. The bound's unit is the gradient of the same layer's query biases. Both are sums of the scores'
gradients, only that the keys' cancel: what rounding leaves is some u of that unit in a model of any size, and from
1e-3 u to 0.3 u of the rms of all gradients.

How far rounding moves one process is another question, with another measure: the norm of Δ, not its largest element,
and Δ's projection on the gradient, in which the roundings of many elements cancel and a factor does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.objectives.distilled import PREFIX
from megatron_port.tools.parity.run_record import RankTrace, assemble, differing_copies


@dataclass(frozen=True)
class Tolerance:
    """Bounds of accepted deviations, all relative (see the module's text)."""

    name: str
    loss: float
    grad_norm: float
    gradient: float
    key_bias: float
    """Largest gradient of a layer's key biases ÷ (rms of its query biases' + 1e-3 × rms of all gradients)."""
    weight: float | None = None
    """max|Δ| ÷ learning rate of the weights after the run; None: not compared."""

    def scaled(self, factor: float) -> Tolerance:
        """Return all bounds times ``factor``."""
        return Tolerance(
            f"{self.name} x {factor:g}", self.loss * factor, self.grad_norm * factor, self.gradient * factor,
            self.key_bias * factor, None if self.weight is None else self.weight * factor,
        )


FP64 = Tolerance("fp64", loss=1e-9, grad_norm=1e-9, gradient=1e-9, key_bias=1e-9, weight=1e-6)
FP32 = Tolerance("fp32", loss=1e-5, grad_norm=1e-4, gradient=1e-4, key_bias=1e-4)
ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""u: the largest relative error of one rounding to a half precision."""
FIRST_STEP = {
    dtype: replace(FP32, name="first step", gradient=1e-2, key_bias=32 * u) for dtype, u in ROUNDOFF.items()
}
"""Tolerances of half precision against one process that emulates the rounding. There are no free-running steps, so they
are fp32's bounds, except for single gradient elements, whose rounding the last bit of a sum may decide."""
SPREAD_FACTOR = 2.0
"""Free-running steps of half precision: so many times what reordering the sums of one process changes."""


@dataclass(frozen=True)
class Distance:
    """Distance by which rounding may move one process in its first step, in units of u × √(1 + layers / 16)."""

    loss: float
    """Relative."""
    grad_norm: float
    """Relative."""
    gradient: float
    """‖Δ‖ ÷ ‖gradient‖, by name."""
    scale: float
    """|Δ · gradient| ÷ ‖gradient‖², by name."""


DISTANCE = Distance(loss=0.2, grad_norm=1.25, gradient=12.0, scale=8.0)
"""Largest distance of the process with emulated rounding from the plain one and from fp32, unless noise does more."""
NOISE_FACTOR = 3.0
"""Largest such distance ÷ the root mean square of what random errors of rounding's size do to fp32
(``parity.emulation``)."""

@dataclass(frozen=True)
class Run:
    """Record of a run, assembled from its ranks."""

    losses: tuple[float, ...]
    grad_norms: tuple[float | None, ...]
    eval_loss: float | None
    final_eval_loss: float | None
    gradients: tuple[dict[str, torch.Tensor], ...]
    weights: dict[str, torch.Tensor]
    differing_copies: tuple[str, ...]

    @classmethod
    def of(cls, traces: Sequence[RankTrace]) -> Run:
        """Assemble a run from every rank's trace. Raises ValueError unless slices cover each tensor exactly once."""
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
    """Deviation of one kind, the largest, and the bound it is held to."""

    quantity: str
    where: str
    value: float
    bound: float
    rule: str = ""
    """Description of the comparison and its bounds."""

    @property
    def ok(self) -> bool:
        """Whether it is within the bound (NaN is not)."""
        return self.value <= self.bound

    def __str__(self) -> str:
        mark = "ok" if self.ok else "DIFFERS"
        return f"{self.quantity:<12} {self.value:9.2e}  bound {self.bound:8.1e}  {mark:<8} {self.where}"


def key_bias_rows(model: ModelConfig) -> torch.Tensor:
    """Return True for the rows of ``attention.qkv.bias`` that are key biases."""
    return _qkv_rows(model, slice(-2, -1))


def _qkv_rows(model: ModelConfig, of_group: slice) -> torch.Tensor:
    """Return rows of ``attention.qkv.bias``; a group has its queries' first (and gates'), then the keys', then the
    values'."""
    queries = model.num_attention_heads * (1 + model.attention_gate)
    per_group, d = queries // model.kv_heads + 2, model.head_size
    rows = torch.zeros(model.kv_heads, per_group, d, dtype=torch.bool)
    rows[:, of_group] = True
    return rows.flatten()


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), 1e-30)


def _without_keys(name: str, t: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    mine = name.endswith("attention.qkv.bias") and not name.startswith(PREFIX)  # a teacher's are not trained
    return t[~keys] if mine else t


def rms_of(gradients: dict[str, torch.Tensor]) -> float:
    """Return the root mean square of all elements."""
    count = sum(g.numel() for g in gradients.values())
    found: float = (sum(float(g.square().sum()) for g in gradients.values()) / max(count, 1)) ** 0.5
    return found


def _worst(found: Iterable[tuple[float, str]]) -> tuple[float, str]:
    """Return the largest (value, where); NaN is larger than any number, which ``max`` would pass over."""
    worst = (0.0, "-")
    for one in found:
        if not one[0] <= worst[0]:
            worst = one
            if one[0] != one[0]:
                break
    return worst


def _norm_deviation(a: float | None, b: float | None) -> float:
    """Return the deviation of two gradient norms; None: not finite, the step was skipped."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return _relative(a, b)


def _shifts_all_keys(model: ModelConfig, name: str) -> bool:
    """Return whether a layer's key biases are the same shift for all keys, and so have no gradient: where keys are
    neither rotated nor normed. A soft-cap makes of the same shift different ones, and a sink is not shifted."""
    capped = model.attention_softcap > 0 or model.attention_sinks
    kind, index = name.split(".")[:2]
    rotates = model.rotates(int(index) + (model.num_layers if kind == "mtp" else 0))
    return not rotates and not model.qk_norm and not capped


def gradient_deviation(
    a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], model: ModelConfig
) -> tuple[tuple[float, str], tuple[float, str]]:
    """Return ((largest deviation, name), (largest key-bias gradient in its unit, name)).

    Raises ValueError when the two runs have different parameters.
    """
    if a.keys() != b.keys():
        raise ValueError(f"the runs have different parameters: {sorted(a.keys() ^ b.keys())}")
    rms_all = rms_of(a)
    keys, queries = key_bias_rows(model), _qkv_rows(model, slice(-2))
    found, found_keys = [], []
    for name, ga in a.items():
        gb = b[name]
        if name.endswith("attention.qkv.bias") and _shifts_all_keys(model, name):
            largest = torch.maximum(ga[keys].abs().max(), gb[keys].abs().max())
            unit = float(ga[queries].square().mean().sqrt()) + 1e-3 * rms_all
            found_keys.append((float(largest) / max(unit, 1e-300), name))
            ga, gb = ga[~keys], gb[~keys]
        rms = float(ga.square().mean().sqrt())
        found.append((float((ga - gb).abs().max()) / max(rms + 1e-3 * rms_all, 1e-300), name))
    return _worst(found), _worst(found_keys)


def compare(
    reference: Run, other: Run, tolerance: Tolerance, model: ModelConfig, *, lr: float = 0.0
) -> list[Deviation]:
    """Return every kind of deviation with its bound; ``[d for d in … if not d.ok]`` are the failures."""
    out: list[Deviation] = []

    def add(quantity: str, value: float, where: str, bound: float) -> None:
        out.append(Deviation(quantity, where, value, bound, tolerance.name))

    losses = zip(reference.losses, other.losses, strict=True)
    add("loss", *_worst((_relative(x, y), f"step {i}") for i, (x, y) in enumerate(losses)), tolerance.loss)
    norms = zip(reference.grad_norms, other.grad_norms, strict=True)
    add("grad norm", *_worst((_norm_deviation(x, y), f"step {i}") for i, (x, y) in enumerate(norms)),
        tolerance.grad_norm)
    if reference.eval_loss is not None and other.eval_loss is not None:
        add("eval loss", _relative(reference.eval_loss, other.eval_loss), "", tolerance.loss)
    if reference.final_eval_loss is not None and other.final_eval_loss is not None:
        add("final eval", _relative(reference.final_eval_loss, other.final_eval_loss), "", tolerance.loss)
    applied = [i for i, norm in enumerate(reference.grad_norms) if norm is not None]
    for step, a, b in zip(applied, reference.gradients, other.gradients):
        (value, name), (key, key_name) = gradient_deviation(a, b, model)
        add("gradient", value, f"step {step}, {name}", tolerance.gradient)
        if key_name != "-":
            add("key bias", key, f"step {step}, {key_name}", tolerance.key_bias)
    if tolerance.weight is not None and lr > 0.0:
        keys = key_bias_rows(model)
        weights = [
            (float((_without_keys(n, w, keys) - _without_keys(n, other.weights[n], keys)).abs().max()) / lr, n)
            for n, w in reference.weights.items()
        ]
        add("weight / lr", *_worst(weights), tolerance.weight)
    for name in other.differing_copies:
        add("copies", float("inf"), f"{name} differs between ranks", 0.0)
    return out


def first_step(run: Run) -> Run:
    """Return the run up to its first step (of those that fp16's loss scaling did not skip)."""
    end = 1 + next((i for i, norm in enumerate(run.grad_norms) if norm is not None), 0)
    return replace(
        run, losses=run.losses[:end], grad_norms=run.grad_norms[:end], final_eval_loss=None,
        gradients=run.gradients[:1],
    )


def distances(
    reference: Run, other: Run, dtype: str, model: ModelConfig, *, rule: str,
    noise: Callable[[], tuple[Run, Sequence[Run]]],
) -> list[Deviation]:
    """Return how far rounding to ``dtype`` moved ``other``'s first step from ``reference``'s, held to ``DISTANCE``.

    noise: the process in fp32, and the same with random errors; called where something is further away.
    """
    u = ROUNDOFF[dtype] * (1 + model.num_layers / 16) ** 0.5
    moved = _movements(reference, other, model)
    bounds = {key: getattr(DISTANCE, _DISTANCES[key[0]]) * u for key in moved}
    if not all(value <= bounds[key] for key, value in moved.items()):
        exact, noisy = noise()
        runs = [_movements(exact, run, model) for run in noisy]
        for key, bound in bounds.items():
            typical = (sum(run[key] ** 2 for run in runs) / len(runs)) ** 0.5
            bounds[key] = max(bound, NOISE_FACTOR * typical)
    out = []
    for what in _DISTANCES:
        found = [Deviation(what, key[1], value, bounds[key], rule) for key, value in moved.items() if key[0] == what]
        out.append(max(found, key=lambda d: d.value / d.bound if d.value == d.value else float("inf")))
    return out


_DISTANCES = {"loss moved": "loss", "norm moved": "grad_norm", "grad moved": "gradient", "grad scale": "scale"}
"""Quantity → its bound."""


def _movements(reference: Run, other: Run, model: ModelConfig) -> dict[tuple[str, str], float]:
    """Return (quantity, where) → the distance of the first steps. Key biases are left out where they have no gradient
    to be near to."""
    a, b = first_step(reference), first_step(other)
    rms_all, keys = rms_of(a.gradients[0]), key_bias_rows(model)
    out = {
        ("loss moved", "first step"): _relative(a.losses[-1], b.losses[-1]),
        ("norm moved", "first step"): _norm_deviation(a.grad_norms[-1], b.grad_norms[-1]),
    }
    for name, ga in a.gradients[0].items():
        gb = b.gradients[0][name]
        if name.endswith("attention.qkv.bias") and _shifts_all_keys(model, name):
            ga, gb = _without_keys(name, ga, keys), _without_keys(name, gb, keys)
        delta, norm = gb - ga, max(float(ga.norm()) + 1e-3 * rms_all * ga.numel() ** 0.5, 1e-300)
        out["grad moved", f"first step, {name}"] = float(delta.norm()) / norm
        out["grad scale", f"first step, {name}"] = abs(float((delta * ga).sum())) / norm**2
    return out


def spread(runs: Sequence[Run], model: ModelConfig, *, name: str, floor: Tolerance) -> Tolerance:
    """Return the largest pairwise deviation among reorderings of one process, never under ``floor``."""
    bounds = {"loss": "loss", "eval loss": "loss", "grad norm": "grad_norm", "gradient": "gradient",
              "key bias": "key_bias"}
    worst = {bound: float(getattr(floor, bound)) for bound in bounds.values()}
    for i, a in enumerate(runs):
        for b in runs[:i]:
            for d in compare(a, b, floor, model):
                if d.quantity in bounds:
                    worst[bounds[d.quantity]] = max(worst[bounds[d.quantity]], d.value)
    return Tolerance(name, **worst)
