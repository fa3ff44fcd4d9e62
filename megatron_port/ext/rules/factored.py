"""Rules that keep sums over the rows and the columns of a matrix in place of a value for each element.

Adafactor by the formula of torch.optim.Adafactor, CAME (Luo et al., arXiv 2307.02047), SM3 (Anil et al.,
arXiv 1901.11150). Vectors, of which rows and columns would be their elements, have a value for each element.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_port.core.config.optimizer import AdafactorOptions, CAMEOptions
from megatron_port.core.config.schema import OptimizerConfig
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.optim.rules import StateKind, UpdateSettings
from megatron_port.ext.rules.sums import LogicalTensor, Rectangle, Rounds, SumsRule, is_matrix


def _add_sums(
    t: LogicalTensor, r: Rectangle, values: torch.Tensor, rows: list[torch.Tensor], columns: torch.Tensor
) -> None:
    """Add the sums over columns and rows of a rectangle's values to those of its rank."""
    rows[r.place][r.rows] += values.sum(1)
    if t.counts(r):
        columns[r.matrix, r.columns] += values.sum(0)


def _rms(total: torch.Tensor, t: LogicalTensor) -> torch.Tensor:
    """Return the root mean square of each matrix from its sum of squares."""
    return (total / (t.rows * t.columns)).sqrt_()


@dataclass(frozen=True)
class Adafactor(SumsRule):
    """Adafactor (Shazeer & Stern, arXiv 1804.04235), as torch.optim.Adafactor; weight decay is decoupled.

    ``optimizer.lr`` is a bound of the relative step, which falls as 1/√step; or, with ``adafactor.relative`` off, the
    step. ``adafactor.momentum`` averages updates that the step has multiplied, as the paper's first moment.
    """

    options: AdafactorOptions = field(default_factory=AdafactorOptions)

    def configured(self, config: OptimizerConfig) -> Adafactor:
        """Return the rule with ``[optimizer.adafactor]``."""
        return Adafactor(config.adafactor)

    def state(self, record: ParameterRecord) -> tuple[StateKind, ...]:
        """Return the mean squares of rows and columns, or of a vector's elements, and the momentum, if there is one."""
        momentum = (StateKind("exp_avg"),) if self.options.momentum else ()
        if is_matrix(record):
            return StateKind("row_var", of="row"), StateKind("col_var", of="column"), *momentum
        return StateKind("variance"), *momentum

    def rounds(self, tensor: LogicalTensor, settings: UpdateSettings) -> Rounds:
        t, o = tensor, self.options
        smallest = o.eps_variance or torch.finfo(t.dtype).eps
        new = settings.step**o.beta2_decay
        weights = t.zeros_of_matrices()
        if t.is_matrix:
            yield from self._second_moments(t, weights, new)
            rows = [place.reduced["row_var"] for place in t.places]
            mean = t.sum_of_rows(rows)
            yield [mean]
            means = (mean.tensors[0] / t.rows).clamp_(min=smallest)
        else:
            for r in t.rectangles:
                if t.counts(r):
                    weights[r.matrix] += r.view(t.places[r.place].master).square().sum()
            yield [t.over_matrices(weights)]
        squares = t.zeros_of_matrices()
        for r in t.rectangles:
            place = t.places[r.place]
            g = r.view(place.gradient)
            if t.is_matrix:
                square = torch.outer(place.reduced["row_var"][r.rows], place.reduced["col_var"][r.matrix, r.columns])
                square /= means[r.matrix]
            else:
                square = r.view(place.state["variance"]).lerp_(g.square(), new).clone()
            g.mul_(square.clamp_(min=smallest * smallest).rsqrt_())
            if t.counts(r):
                squares[r.matrix] += g.square().sum()
        yield [t.over_matrices(squares)]
        step = torch.full_like(weights, settings.lr)
        if o.relative:
            step = _rms(weights, t).clamp_(min=o.eps_scale) * min(settings.lr, settings.step**-0.5)
        step /= (_rms(squares, t) / o.clip_update).clamp_(min=1.0)
        for r in t.rectangles:
            place = t.places[r.place]
            update = r.view(place.gradient).mul_(step[r.matrix])
            if o.momentum:
                update = r.view(place.state["exp_avg"]).lerp_(update, 1.0 - o.momentum)
            r.view(place.master).mul_(1.0 - settings.lr * settings.weight_decay).sub_(update)

    def _second_moments(self, t: LogicalTensor, weights: torch.Tensor, new: float) -> Rounds:
        """Average the mean squares of rows and columns, and add up the weights' squares."""
        rows, columns = t.zeros_of_rows(), t.zeros_of_columns()
        for r in t.rectangles:
            place = t.places[r.place]
            _add_sums(t, r, r.view(place.gradient).square(), rows, columns)
            if t.counts(r):
                weights[r.matrix] += r.view(place.master).square().sum()
        yield [t.over_columns(rows), t.over_rows(columns), t.over_matrices(weights)]
        for place, total in zip(t.places, rows):
            place.reduced["row_var"].lerp_(total / t.columns, new)
        for kept in t.columns_state("col_var"):
            kept.lerp_(columns / t.rows, new)


@dataclass(frozen=True)
class CAME(SumsRule):
    """CAME (Luo et al., arXiv 2307.02047): Adafactor's estimate, damped where the update strays from its momentum.

    beta1, beta2 and ``came.beta3`` are decays of the momentum, the second moment and the instability (the paper: 0.9,
    0.999, 0.9999); weight decay is decoupled.
    """

    options: CAMEOptions = field(default_factory=CAMEOptions)

    def configured(self, config: OptimizerConfig) -> CAME:
        """Return the rule with ``[optimizer.came]``."""
        return CAME(config.came)

    def state(self, record: ParameterRecord) -> tuple[StateKind, ...]:
        """Return the momentum, and mean squares of gradients and of deviations by row and column."""
        if not is_matrix(record):
            return StateKind("exp_avg"), StateKind("exp_avg_sq")
        return (
            StateKind("exp_avg"), StateKind("exp_avg_sq_row", of="row"), StateKind("exp_avg_sq_col", of="column"),
            StateKind("exp_avg_res_row", of="row"), StateKind("exp_avg_res_col", of="column"),
        )

    def rounds(self, tensor: LogicalTensor, settings: UpdateSettings) -> Rounds:
        t, o, s = tensor, self.options, settings
        means = t.zeros_of_matrices()
        if t.is_matrix:
            rows, columns = t.zeros_of_rows(), t.zeros_of_columns()
            for r in t.rectangles:
                _add_sums(t, r, r.view(t.places[r.place].gradient).square().add_(o.eps_square), rows, columns)
            yield from _average(t, "exp_avg_sq", rows, columns, s.beta2, means)
        squares = t.zeros_of_matrices()
        for r in t.rectangles:
            place = t.places[r.place]
            g = r.view(place.gradient)
            if t.is_matrix:
                g.mul_(_inverse_root(t, r, "exp_avg_sq", means))
            else:
                second = r.view(place.state["exp_avg_sq"]).lerp_(g.square().add_(o.eps_square), 1.0 - s.beta2)
                g.mul_(second.rsqrt())
            if t.counts(r):
                squares[r.matrix] += g.square().sum()
        yield [t.over_matrices(squares)]
        shrink = (_rms(squares, t) / o.clip_update).clamp_(min=1.0)
        rows, columns = t.zeros_of_rows(), t.zeros_of_columns()
        for r in t.rectangles:
            place = t.places[r.place]
            g = r.view(place.gradient).div_(shrink[r.matrix])
            momentum = r.view(place.state["exp_avg"]).lerp_(g, 1.0 - s.beta1)
            if t.is_matrix:
                _add_sums(t, r, g.sub_(momentum).square_().add_(o.eps_instability), rows, columns)
        if t.is_matrix:
            yield from _average(t, "exp_avg_res", rows, columns, o.beta3, means)
        for r in t.rectangles:
            place = t.places[r.place]
            update = r.view(place.state["exp_avg"])
            if t.is_matrix:
                update = update * _inverse_root(t, r, "exp_avg_res", means)
            r.view(place.master).mul_(1.0 - s.lr * s.weight_decay).sub_(update, alpha=s.lr)


def _average(
    t: LogicalTensor, kind: str, rows: list[torch.Tensor], columns: torch.Tensor, beta: float, means: torch.Tensor
) -> Rounds:
    """Average sums of rows and columns into their state, and set ``means`` to the mean over each matrix's rows."""
    yield [t.over_columns(rows), t.over_rows(columns)]
    for place, total in zip(t.places, rows):
        place.reduced[f"{kind}_row"].lerp_(total / t.columns, 1.0 - beta)
    for kept in t.columns_state(f"{kind}_col"):
        kept.lerp_(columns / t.rows, 1.0 - beta)
    whole = t.sum_of_rows([place.reduced[f"{kind}_row"] for place in t.places])
    yield [whole]
    means.copy_(whole.tensors[0] / t.rows)


def _inverse_root(t: LogicalTensor, r: Rectangle, kind: str, means: torch.Tensor) -> torch.Tensor:
    """Return 1 / √(row · column / mean of rows) of each element, [rows, columns]."""
    reduced = t.places[r.place].reduced
    row = (reduced[f"{kind}_row"][r.rows] / means[r.matrix]).rsqrt_()
    return torch.outer(row, reduced[f"{kind}_col"][r.matrix, r.columns].rsqrt())


class SM3(SumsRule):
    """SM3-II (Anil et al., arXiv 1901.11150) over rows and columns, with momentum ``beta1`` as in the paper's runs.

    ``v = min(row, column) + g²``, ``m = beta1 m + (1 - beta1) g / √v``, ``p -= lr (m + weight_decay p)``; a row's and a
    column's new value is the largest v in it. Maxima round nothing, so layouts agree to the bit where gradients do.
    """

    def state(self, record: ParameterRecord) -> tuple[StateKind, ...]:
        """Return the momentum, and the accumulators of rows and columns, or of a vector's elements."""
        if is_matrix(record):
            return StateKind("exp_avg"), StateKind("row_max", of="row"), StateKind("col_max", of="column")
        return StateKind("exp_avg"), StateKind("sum")

    def rounds(self, tensor: LogicalTensor, settings: UpdateSettings) -> Rounds:
        t, s = tensor, settings
        rows, columns = t.zeros_of_rows(), t.zeros_of_columns()
        for r in t.rectangles:
            place = t.places[r.place]
            g = r.view(place.gradient)
            if t.is_matrix:
                above = place.reduced["row_max"][r.rows].unsqueeze(1)
                square = torch.minimum(above, place.reduced["col_max"][r.matrix, r.columns]).addcmul_(g, g)
                rows[r.place][r.rows] = torch.maximum(rows[r.place][r.rows], square.amax(1))
                columns[r.matrix, r.columns] = torch.maximum(columns[r.matrix, r.columns], square.amax(0))
            else:
                square = r.view(place.state["sum"]).addcmul_(g, g)
            # Where all gradients so far were zero, 0 / 0 stands for 0.
            step = torch.where(square > 0, g / square.sqrt(), torch.zeros_like(g))
            momentum = r.view(place.state["exp_avg"]).lerp_(step, 1.0 - s.beta1)
            r.view(place.master).mul_(1.0 - s.lr * s.weight_decay).sub_(momentum, alpha=s.lr)
        if t.is_matrix:
            largest = dist.ReduceOp.MAX
            yield [t.over_columns(rows, largest), t.over_rows(columns, largest)]
            for place, values in zip(t.places, rows):
                place.reduced["row_max"].copy_(values)
            for kept in t.columns_state("col_max"):
                kept.copy_(columns)


ADAFACTOR, CAME_RULE, SM3_RULE = Adafactor(), CAME(), SM3()
