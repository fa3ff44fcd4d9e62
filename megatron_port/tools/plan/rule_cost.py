"""State, operations and traffic of an optimizer rule for the whole model (``plan.rule_seconds``: on one rank).

AdamW's two moments are known. Another rule is imported, and torch with it, and asked about the model's records. Its
state is counted in the mean over the model; a rank with Muon's tables, which have AdamW's moments, has a little more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from megatron_port.core.config.optimizer import OptimizerConfig
from megatron_port.core.config.schema import ModelConfig

if TYPE_CHECKING:
    from megatron_port.core.dist.record import ParameterRecord
    from megatron_port.core.optim.rules import OptimizerRule


@dataclass(frozen=True)
class RuleCost:
    """A rule and the model's elements, unsplit."""

    name: str = "adamw"
    state: float = 2.0
    """Tensors of optimizer state for each parameter, as wide as its master, masters left out, in the mean."""
    matrices: int = 0
    """Elements of the matrices that come together on owners."""
    products: float = 0.0
    """Operations on them."""
    sums: int = 0
    """Values of rows and columns."""


ADAMW = RuleCost()


def rule_cost(optimizer: OptimizerConfig, model: ModelConfig) -> RuleCost:
    """Return what a rule costs for a model.

    Raises:
        ConfigError: a plugin's rule cannot be imported, or is none.
    """
    if optimizer.name == "adamw":
        return replace(ADAMW, state=3.0) if optimizer.ema_decay else ADAMW
    from megatron_port.core.optim.rules import rule_of

    return _cost(rule_of(optimizer), optimizer, model)


def state_bytes(rule: OptimizerRule, record: ParameterRecord, wide: int = 4) -> float:
    """Return the bytes of state for each element of a parameter, by logical shapes."""
    total = sum(prod(k.shape(record)) * (wide if k.dtype is None else k.dtype.itemsize) for k in rule.state(record))
    return total / max(record.numel, 1)


@lru_cache(maxsize=64)
def _cost(rule: OptimizerRule, optimizer: OptimizerConfig, model: ModelConfig) -> RuleCost:
    from megatron_port.core.model.shapes import model_records
    from megatron_port.ext.rules.matrices import MatrixRule, shapes_of

    records = list(model_records(model).values())
    total = sum(r.numel for r in records)
    mean = sum(state_bytes(rule, r, wide=4) * r.numel for r in records) / (4 * total)
    sums = sum(prod(k.shape(r)) for r in records for k in rule.state(r) if not k.divided)
    formula = rule.formula
    taken = [r for r in records if isinstance(formula, MatrixRule) and formula.takes(r)]
    products = 0.0
    for r in taken:
        for rows, columns in shapes_of(r):
            small, large = sorted((rows, columns))
            # Of each iteration: a product with the transpose, that one's square, and both with the matrix.
            products += prod(r.shape[:-2]) * optimizer.muon.ns_steps * (4.0 * small * small * large + 2.0 * small**3)
    return RuleCost(optimizer.name, mean, sum(r.numel for r in taken), products, sums)
