"""LAMB: steps whose length is that of the weights of a layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_port.core.config.rule_options import LAMBOptions
from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.optim.rules import AdamW, StateKind, UpdateSettings
from megatron_port.core.optim.sums import LogicalTensor, Rounds
from megatron_port.ext.rules.sums_update import SumsRule


@dataclass(frozen=True)
class LAMB(SumsRule):
    """LAMB (You et al., arXiv 1904.00962, algorithm 2; the norms are not bounded).

    ``u = m̂ / (√v̂ + eps) + weight_decay p``, ``p -= lr · ‖p‖ / ‖u‖ · u``, where a norm is one matrix's, and the ratio 1
    where one of them is 0. Biases and norms take the step without the ratio unless ``lamb.adapts_vectors``.
    """

    options: LAMBOptions = field(default_factory=LAMBOptions)

    def configured(self, config: OptimizerConfig) -> LAMB:
        """Return the rule with ``[optimizer.lamb]``."""
        return LAMB(config.lamb)

    def state(self, record: ParameterRecord) -> tuple[StateKind, ...]:
        """Return both moments."""
        return tuple(map(StateKind, AdamW.KINDS))

    def rounds(self, tensor: LogicalTensor, settings: UpdateSettings) -> Rounds:
        t, s = tensor, settings
        weights, updates = t.zeros_of_matrices(), t.zeros_of_matrices()
        first, second = 1.0 - s.beta1**s.step, 1.0 - s.beta2**s.step
        for r in t.rectangles:
            place = t.places[r.place]
            g, p = r.view(place.gradient), r.view(place.master)
            exp_avg = r.view(place.state["exp_avg"]).lerp_(g, 1.0 - s.beta1)
            exp_avg_sq = r.view(place.state["exp_avg_sq"]).mul_(s.beta2).addcmul_(g, g, value=1.0 - s.beta2)
            root = (exp_avg_sq / second).sqrt_().add_(s.eps)
            torch.div(exp_avg / first, root, out=g)
            g.add_(p, alpha=s.weight_decay)
            if t.counts(r):
                weights[r.matrix] += p.square().sum()
                updates[r.matrix] += g.square().sum()
        ratio = torch.ones_like(weights)
        if t.is_matrix or self.options.adapts_vectors:
            yield [t.over_matrices(weights), t.over_matrices(updates)]
            both = (weights > 0) & (updates > 0)
            ratio = torch.where(both, (weights / updates.clamp(min=torch.finfo(t.dtype).tiny)).sqrt(), ratio)
        for r in t.rectangles:
            place = t.places[r.place]
            r.view(place.master).sub_(r.view(place.gradient).mul_(ratio[r.matrix]), alpha=s.lr)


LAMB_RULE = LAMB()
