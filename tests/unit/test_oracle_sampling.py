"""Drawing of tokens against transformers' warpers, with enough draws that a biased one fails; contexts that outgrow the
window, stops, and scores."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_port.core.layers.cross_entropy import torch_cross_entropy
from megatron_port.tools.inference.generation import Generator, Sampling, draw, filter_logits
from megatron_port.tools.inference.model import Perplexity, windows
from megatron_port.tools.inference.scoring import _token_scores


def warped(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """transformers' warpers, in the order in which its generate() applies them."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    ids: Any = torch.zeros(len(logits), 1, dtype=torch.int64)
    logits = TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k:
        logits = TopKLogitsWarper(top_k)(ids, logits)
    return TopPLogitsWarper(top_p)(ids, logits) if top_p < 1.0 else logits


SETTINGS = [
    (1.0, 0, 1.0), (0.5, 0, 1.0), (3.0, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.6), (0.6, 0, 0.8), (2.5, 5, 0.9),
    (0.7, 2, 0.3), (1.0, 1, 0.9), (1.0, 99, 0.999), (3.0, 4, 0.7),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_filters_are_transformers(temperature: float, top_k: int, top_p: float) -> None:
    """On the logits divided by the temperature, top-k first, top-p of what is left; equal logits stay together."""
    logits = 2 * torch.randn(300, 13, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits[::3] = logits[::3].round()  # with equals
    found = filter_logits(logits / temperature, top_k=top_k, top_p=top_p)
    distinct = torch.tensor([len(row.unique()) == 13 for row in logits]) if top_p < 1.0 else torch.ones(300).bool()
    wanted = warped(logits, temperature, top_k, top_p)
    assert torch.equal(found[distinct], wanted[distinct])  # of equals at the edge of top_p any may stay
    assert torch.equal(found.isfinite().sum(-1), wanted.isfinite().sum(-1))


@pytest.mark.parametrize(("top_p", "kept"), [
    (0.125, 1), (0.126, 2), (0.25, 2), (0.5, 4), (0.51, 5), (0.75, 6), (0.76, 7), (0.875, 7), (0.876, 8), (1.0, 8),
])
def test_the_smallest_set_of_the_mass(top_p: float, kept: int) -> None:
    """Of eight equal tokens, whose sums are exact: a set whose mass is top_p is enough (arXiv 1904.09751, section 3.1),
    for transformers too."""
    logits = torch.zeros(1, 8, dtype=torch.float64)
    assert int(filter_logits(logits, top_p=top_p).isfinite().sum()) == kept
    assert int(warped(logits, 1.0, 0, top_p).isfinite().sum()) == kept


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_draws_have_transformers_distribution(temperature: float, top_k: int, top_p: float) -> None:
    """20,000 draws, by chi-square; what is left out is never drawn."""
    count, logits = 20_000, torch.tensor([[0.3, -0.5, 1.2, 0.9, -2.0, 0.0, 1.0]], dtype=torch.float64)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    p = warped(logits, temperature, min(top_k, 7), top_p).softmax(-1)[0].numpy()
    drawn = draw(logits.expand(count, 7), sampling, torch.arange(count), 5)
    counts = np.bincount(drawn.numpy(), minlength=7)
    assert not counts[p == 0].any()
    free = int((p > 0).sum()) - 1
    chi = ((counts - count * p)[p > 0] ** 2 / (count * p[p > 0])).sum()
    assert chi <= free + 5 * math.sqrt(2 * free)


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(2))
    assert torch.equal(draw(logits, Sampling(temperature=0.0), torch.arange(50), 0), logits.argmax(-1))


# ------------------------------------------------------------------------------------------------ the loop around it


class Scripted:
    """A model whose logits are a function of all that it sees: any other context gives other tokens."""

    def __init__(self, window: int, vocab: int = 11) -> None:
        self.model = SimpleNamespace(seq_length=window, vocab_size=vocab, mixers=("attention",))
        self.ctx = SimpleNamespace(
            index=lambda *axes: 0, size=lambda *axes: 1, topology=SimpleNamespace(pp=1), device=torch.device("cpu"))
        self.seen: dict[int, list[list[int]]] = {}
        self.longest = 0

    def of(self, context: list[int]) -> torch.Tensor:
        self.longest = max(self.longest, len(context))
        key = hash(tuple(context)) % (1 << 31)
        return torch.randn(self.model.vocab_size, generator=torch.Generator().manual_seed(key))

    def batches(self, count: int, size: int) -> int:
        return -(-count // size)

    def logits(self, tokens: torch.Tensor, cache: Any, rows: list[int] | None = None) -> torch.Tensor:
        if rows is not None:
            self.seen[id(cache)] = [row[: at + 1].tolist() for row, at in zip(tokens, rows)]
        else:
            for context, (token,) in zip(self.seen[id(cache)], tokens.tolist()):
                context.append(token)
        return torch.stack([self.of(context) for context in self.seen[id(cache)]])[None]

    def __getattr__(self, name: str) -> Any:  # one process: nothing to exchange
        return lambda x: x


def continued(model: Scripted, prompt: list[int], count: int, stop: int) -> tuple[list[int], bool]:
    """One prompt by itself, by argmax: the window keeps three quarters of what it has when it is full."""
    window, context, new = model.model.seq_length, list(prompt[-model.model.seq_length :]), list[int]()
    for _ in range(count):
        if len(context) > window:
            context = context[len(context) - (window - window // 4) :]
        token = int(model.of(context).argmax())
        if token == stop:
            return new, True
        new.append(token)
        context.append(token)
    return new, False


@pytest.mark.parametrize("window", [5, 8])
def test_contexts_that_outgrow_the_window_drop_their_oldest_quarter(window: int) -> None:
    model, prompts = Scripted(window), [[1, 2], [3, 1, 4, 1, 5, 9, 2, 6, 5], [10], [7] * window]
    for prompt in prompts:
        (found,) = Generator(model).generate(  # type: ignore[arg-type]
            [prompt], Sampling(temperature=0.0, max_new_tokens=25, stop_ids=(0,)))
        assert (found.tokens, found.stopped) == continued(model, prompt, 25, 0)
    assert model.longest == window


def test_a_text_ends_before_its_stop_and_after_its_number() -> None:
    model, options = Scripted(64), dict[str, Any](temperature=0.0, max_new_tokens=20)
    generator = Generator(model, lambda tokens: "".join("abcdefghijk"[t] for t in tokens))  # type: ignore[arg-type]
    (whole,) = generator.generate([[3, 4]], Sampling(**options))
    assert len(whole.tokens) == 20 and not whole.stopped and whole.text is not None
    for at in (1, 7, 15):
        stop = whole.text[at : at + 2]
        (found,) = generator.generate([[3, 4]], Sampling(**options, stop_strings=(stop, "zz")))
        assert found.stopped and found.text == whole.text[: whole.text.index(stop)]
    twice = Generator(model, lambda tokens: "ab.cd." * len(tokens))  # type: ignore[arg-type]
    (found,) = twice.generate([[3, 4]], Sampling(**options, stop_strings=(".",)))
    assert (len(found.tokens), found.text) == (1, "ab")  # the first of two in one token


# ------------------------------------------------------------------------------------------------ scores


def test_scores_are_torchs_log_softmax() -> None:
    """In nats; the likeliest is greedy, an equal one too."""
    logits = torch.randn(6, 3, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits[..., 10:] = 50.0  # padding
    labels = torch.randint(0, 10, (6, 3), generator=torch.Generator().manual_seed(4))
    labels[0] = logits[0, :, :10].argmax(-1)
    logits[1, 0, :10], labels[1, 0] = 1.0, 7
    model: Any = SimpleNamespace(
        vocabulary=(0, 10), ctx=SimpleNamespace(over=lambda *axes: None),
        stage=SimpleNamespace(head=SimpleNamespace(cross_entropy=torch_cross_entropy)),
    )
    log_p, greedy = _token_scores(model, logits, labels)
    real = logits[..., :10]
    wanted = torch.log_softmax(real, -1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(log_p, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(greedy, real.gather(-1, labels[..., None])[..., 0] == real.amax(-1))
    assert greedy[0].all() and greedy[1, 0]


def test_perplexity_and_bits() -> None:
    found = Perplexity(math.log(8.0), 300)
    assert found.perplexity == pytest.approx(8.0) and found.bits_per_byte(450) == pytest.approx(3 * 300 / 450)


@pytest.mark.parametrize(("tokens", "length", "stride", "count"), [
    (2, 4, 4, 1), (5, 4, 4, 1), (6, 4, 4, 2), (9, 4, 4, 2), (10, 4, 4, 3), (9, 4, 2, 3), (10, 4, 3, 3),
])
def test_number_of_windows(tokens: int, length: int, stride: int, count: int) -> None:
    assert windows(tokens, length, stride) == count
