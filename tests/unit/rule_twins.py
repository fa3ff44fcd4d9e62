"""The papers' formulas in plain fp64 tensor algebra, one whole matrix or vector at a time, sharing no code with the
rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Tensor = torch.Tensor


@dataclass
class Twin:
    """One tensor's weights and what a formula keeps of it."""

    w: Tensor
    kept: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.kept.get(name, torch.zeros(shape, dtype=self.w.dtype))


def sm3(t: Twin, g: Tensor, *, lr: float, beta1: float, decay: float) -> None:
    """arXiv 1901.11150, SM3-II with the cover of rows and columns; of a vector each element is a set."""
    if g.dim() == 1:
        v = t.get("v", tuple(g.shape)) + g**2
        t.kept["v"] = v
    else:
        rows, columns = t.get("rows", (g.shape[0],)), t.get("columns", (g.shape[1],))
        v = torch.empty_like(g)
        for i in range(g.shape[0]):
            for j in range(g.shape[1]):
                v[i, j] = min(rows[i], columns[j]) + g[i, j] ** 2
        t.kept["rows"], t.kept["columns"] = v.max(1).values, v.max(0).values
    u = torch.where(v == 0, torch.zeros_like(g), g / torch.where(v == 0, torch.ones_like(v), v).sqrt())
    t.kept["m"] = beta1 * t.get("m", tuple(g.shape)) + (1 - beta1) * u
    t.w = t.w - lr * decay * t.w - lr * t.kept["m"]


def came(
    t: Twin, g: Tensor, *, lr: float, betas: tuple[float, float, float], decay: float, d: float = 1.0,
    eps: tuple[float, float] = (1e-30, 1e-16),
) -> None:
    """arXiv 2307.02047, algorithm 2; a vector has a value for each element and no confidence."""
    (e1, e2), (b1, b2, b3) = eps, betas
    sq = g**2 + e1
    if g.dim() == 1:
        v = t.kept["v"] = b2 * t.get("v", tuple(g.shape)) + (1 - b2) * sq
    else:
        r = t.kept["r"] = b2 * t.get("r", (g.shape[0],)) + (1 - b2) * sq.mean(1)
        c = t.kept["c"] = b2 * t.get("c", (g.shape[1],)) + (1 - b2) * sq.mean(0)
        v = r[:, None] * c[None] / r.mean()
    u = g / v.sqrt()
    u = u / max(1.0, float(u.pow(2).mean().sqrt()) / d)
    m = t.kept["m"] = b1 * t.get("m", tuple(g.shape)) + (1 - b1) * u
    step = m
    if g.dim() == 2:
        s = (u - m) ** 2 + e2
        r = t.kept["sr"] = b3 * t.get("sr", (g.shape[0],)) + (1 - b3) * s.mean(1)
        c = t.kept["sc"] = b3 * t.get("sc", (g.shape[1],)) + (1 - b3) * s.mean(0)
        step = m / (r[:, None] * c[None] / r.mean()).sqrt()
    t.w = t.w - lr * decay * t.w - lr * step


def adafactor(
    t: Twin, g: Tensor, *, lr: float, decay: float, momentum: float, relative: bool, d: float = 1.0,
) -> None:
    """arXiv 1804.04235, algorithms 4 to 6, with section 7's first moment of what is subtracted; decay decoupled."""
    t.step += 1
    new, least = t.step**-0.8, torch.finfo(g.dtype).eps
    if g.dim() == 1:
        v = t.kept["v"] = (1 - new) * t.get("v", tuple(g.shape)) + new * g**2
    else:
        r = t.kept["r"] = (1 - new) * t.get("r", (g.shape[0],)) + new * (g**2).mean(1)
        c = t.kept["c"] = (1 - new) * t.get("c", (g.shape[1],)) + new * (g**2).mean(0)
        v = r[:, None] * c[None] / r.mean().clamp(min=least)
    u = g / v.clamp(min=least**2).sqrt()
    u = u / max(1.0, float(u.pow(2).mean().sqrt()) / d)
    if relative:
        u = u * max(1e-3, float(t.w.pow(2).mean().sqrt())) * min(1.0, t.step**-0.5 / lr)
    m = t.kept["m"] = momentum * t.get("m", tuple(g.shape)) + (1 - momentum) * lr * u
    t.w = t.w - lr * decay * t.w - m


def lamb(t: Twin, g: Tensor, *, lr: float, betas: tuple[float, float], eps: float, decay: float, ratio: bool) -> None:
    """arXiv 1904.00962, algorithm 2, with the identity for phi."""
    t.step += 1
    m = t.kept["m"] = betas[0] * t.get("m", tuple(g.shape)) + (1 - betas[0]) * g
    v = t.kept["v"] = betas[1] * t.get("v", tuple(g.shape)) + (1 - betas[1]) * g**2
    u = (m / (1 - betas[0] ** t.step)) / ((v / (1 - betas[1] ** t.step)).sqrt() + eps) + decay * t.w
    a, b = float(t.w.norm()), float(u.norm())
    t.w = t.w - lr * (a / b if ratio and a > 0 and b > 0 else 1.0) * u


def muon(
    t: Twin, g: Tensor, *, lr: float, momentum: float, decay: float, factor: Callable[[int, int], float],
    nesterov: bool = True, steps: int = 5,
) -> None:
    """Jordan et al., 2024: polynomials of singular values, by a singular value decomposition. A norm below 1e-7, as in
    torch.optim.Muon, counts as that."""
    m = t.kept["m"] = momentum * t.get("m", tuple(g.shape)) + (1 - momentum) * g
    seen = momentum * m + (1 - momentum) * g if nesterov else m
    u, s, vt = torch.linalg.svd(seen, full_matrices=False)
    s = s / max(math.sqrt(float((s**2).sum())), 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    t.w = t.w - lr * decay * t.w - lr * factor(*g.shape) * (u * s) @ vt
