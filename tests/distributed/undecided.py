"""Routes in fp32 that rounding decides, once updates have made weights differ, and that nothing else differs.

Adam makes of an element whose gradient is rounding a step of the learning rate's size, so that from the second step on
a layout's weights differ by more than a rounding, and now and then a token whose experts are nearly alike is sent to
another one. Then one process is sent the layout's way: its router scores each token itself, and takes the layout's
choice. Of the tokens for which it would have chosen otherwise each one must have been undecided: experts that change
places were at most twice as far apart as other orders of the same sums move them, on one process
(``parity.emulation``). All else is held to the bounds that it has without experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from megatron_port.core.layers.step import StepContext
from megatron_port.ext.experts.router import ROUTES, Router
from megatron_port.ext.experts.torch_ops import Routed
from megatron_port.tools.parity.comparison import SPREAD_FACTOR, Deviation

Token = tuple[int, int, int, int]
"""Step, layer, sample, position."""
Choice = tuple[int, int, int, int, tuple[int, ...]]
"""And the experts that it is sent to, dropped copies as -1 - expert."""
MOST_FLIPPED = 1 / 500


class Follower:
    """Routes of one process: a layout's, while the scores of its own router are kept (a ``RouteKeeper``)."""

    def __init__(self, choices: Iterable[Choice]) -> None:
        self.given: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for *place, experts in sorted(choices):
            self.given.setdefault(tuple(place[:3]), []).append(experts)
        self.values: dict[Token, torch.Tensor] = {}
        """What the largest of are chosen: float64 [E]."""
        self.flipped: list[tuple[Token, set[int], set[int]]] = []
        """Experts that its own router would have chosen, and not; of the tokens that it would have sent elsewhere."""
        self.kept_otherwise = 0

    def attach(self, engine: Any) -> None:
        """Begin."""
        self.stream, self.slot = engine.stream, engine.step_slot
        self.slot.keepers[ROUTES] = self
        for module in (m for m in engine.stage.modules() if isinstance(m, Router)):
            module._routed = functools.partial(self._scored, module, module._routed)  # type: ignore[method-assign]
            module._kept = functools.partial(self._dropped, module, module._kept)  # type: ignore[method-assign]

    def fixed(self, layer: int, context: StepContext) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the layout's choice."""
        if not self.stream.enabled:
            return None
        by_sample = [self.given[context.samples.step, layer, sample] for sample in context.sample_ids]
        marked = torch.tensor(by_sample).transpose(0, 1).flatten(0, 1)
        return torch.where(marked < 0, -1 - marked, marked), marked >= 0

    def note(self, layer: int, context: StepContext, experts: torch.Tensor, kept: torch.Tensor | None) -> None:
        """Nothing: the choice is the given one."""

    def _scored(
        self, router: Router, choose: Callable[[torch.Tensor, torch.Tensor | None], Routed], logits: torch.Tensor,
        given: torch.Tensor | None,
    ) -> Routed:
        context = self.slot.current
        if given is not None and not context.recomputing:
            own = router.ops.route(logits.detach(), router.balance_bias, router.routing)
            values = own.scores if router.balance_bias is None else own.scores + router.balance_bias
            tokens = [(position, sample) for position in range(len(given) // len(context.sample_ids))
                      for sample in context.sample_ids]
            for (position, sample), value, mine, theirs in zip(
                tokens, values.double(), own.experts.tolist(), given.tolist(), strict=True
            ):
                token = context.samples.step, router.index, sample, position
                self.values[token] = value
                if mine != theirs:
                    self.flipped.append((token, set(mine) - set(theirs), set(theirs) - set(mine)))
        return choose(logits, given)

    def _dropped(self, router: Router, keep: Callable[..., torch.Tensor | None], *args: Any) -> torch.Tensor | None:
        own, context = keep(*args), self.slot.current
        given = self.fixed(router.index, context) if context is not None else None
        if own is not None and given is not None and not context.recomputing:
            self.kept_otherwise += int((own != given[1]).any(dim=1).sum())
        return own


def undecided(one: Follower, reordered: Sequence[Follower]) -> list[Deviation]:
    """Whether rounding explains each token that one process would have sent elsewhere than the layout.

    ``reordered``: the same process with its sums in other orders, sent the same way.
    """
    def ratio(token: Token, mine: set[int], theirs: set[int]) -> float:
        """Return how far apart experts were, in units of how far rounding moves them."""
        values = one.values[token]
        moved = torch.stack([(other.values[token] - values).abs() for other in reordered]).amax(dim=0)
        return max((float((values[a] - values[b]) / (moved[a] + moved[b])) for a in mine for b in theirs), default=0.0)

    ratios = sorted(((ratio(*flip), flip) for flip in one.flipped), reverse=True)
    words = f"{len(one.flipped)} of {len(one.values)} tokens"
    return [
        Deviation("flipped", words, len(one.flipped) / len(one.values), MOST_FLIPPED, "routes, followed"),
        Deviation("margin", f"{ratios[:1]}", ratios[0][0] if ratios else 0.0, SPREAD_FACTOR, "routes, followed"),
        Deviation("kept otherwise", "", float(one.kept_otherwise), 0.0, "routes, followed"),
    ]
