"""Continue prompts with a model split in any way.

Prompts are read at once and their keys and values kept (``inference.model``); each new token is then one position.
The last stage draws the tokens of a batch from the gathered logits, and the other stages hear of them just before they
need them: with more batches than stages, every stage has work meanwhile. Replicas take the prompts in turn; those that
share experts stop together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron_port.core.config.model import ATTENTION, MixerKind
from megatron_port.core.dist.counter import key_of, random_bits, uniform
from megatron_port.core.errors import ConfigError
from megatron_port.core.io.logging import Advance, silent
from megatron_port.core.registry import MIXERS
from megatron_port.tools.inference.cache import KeyValueCache
from megatron_port.tools.inference.model import InferenceModel, misplaced_token

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options: how tokens are drawn, and when a text ends."""

    max_new_tokens: int = 100
    temperature: float = 1.0
    """0: always the likeliest."""
    top_k: int = 0
    """Sample from the k likeliest tokens only; 0: all."""
    top_p: float = 1.0
    """Sample from the smallest set of this mass (nucleus sampling, Holtzman et al., arXiv 1904.09751)."""
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    """A token that ends the text; it is not part of it."""
    stop_strings: tuple[str, ...] = ()
    """The text ends before the first of them. Needs ``decode``."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.temperature < 0.0 or not 0.0 < self.top_p <= 1.0 or self.top_k < 0:
            raise ConfigError(
                f"tokens {self.max_new_tokens}, temperature {self.temperature}, top-p {self.top_p}, top-k "
                f"{self.top_k}: tokens must be at least 1, temperature and top-k at least 0, top-p in (0, 1]"
            )
        if "" in self.stop_strings:
            raise ConfigError("an empty stop string would end every text at once")


@dataclass(frozen=True)
class Continuation:
    """Continuation of one prompt."""

    tokens: list[int]
    """New tokens, without the one that ended the text."""
    stopped: bool
    """By a stop id or string, not by ``max_new_tokens``."""
    text: str | None = None
    """Text that the new tokens add to the prompt's, cut before the stop string; None without ``decode``."""


def filter_logits(logits: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Return [..., vocab] with all but the ``top_k`` likeliest and the smallest set of mass ``top_p`` at -inf.

    The likeliest token always stays.
    """
    out = logits.clone()
    if 0 < top_k < out.shape[-1]:
        out[out < out.topk(top_k, dim=-1).values[..., -1:]] = float("-inf")
    if top_p < 1.0:
        ordered, order = out.sort(dim=-1, descending=True)
        mass = torch.softmax(ordered, dim=-1).cumsum(-1)
        beyond = torch.zeros_like(mass, dtype=torch.bool)
        beyond[..., 1:] = mass[..., :-1] >= top_p
        out[torch.zeros_like(beyond).scatter_(-1, order, beyond)] = float("-inf")
    return out


def draw(logits: torch.Tensor, sampling: Sampling, keys: torch.Tensor, at: int) -> torch.Tensor:
    """Draw int64 [batch] from logits [batch, vocab]; ``keys`` int64 [batch] and ``at`` (tokens so far) fix the draw."""
    if sampling.temperature == 0.0:
        return logits.argmax(dim=-1)
    kept = filter_logits(logits / sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    mass = torch.softmax(kept.double(), dim=-1).cumsum(-1)
    u = uniform(random_bits(torch.full_like(keys, at), keys))
    found = torch.searchsorted(mass, (u * mass[:, -1])[:, None], right=True)[:, 0]
    return found.clamp_(max=logits.shape[-1] - 1)


@dataclass
class _Batch:
    """Prompts that are continued together."""

    indices: list[int]
    """Indices of the prompts, in the order asked for."""
    tokens: list[list[int]]
    """Prompt and what was drawn. A text that has ended no longer grows; its row of the batch repeats its last token."""
    prompts: list[int]
    """Lengths of the prompts."""
    starts: list[int]
    """First token that the model still sees."""
    stopped: list[bool]
    cache: KeyValueCache | None = None
    drawn: torch.Tensor | None = None
    """Tokens drawn in the last pass, not yet known to all stages."""

    @property
    def finished(self) -> bool:
        """Whether every text has ended."""
        return all(self.stopped)


def _idle() -> _Batch:
    """Return a batch of one ended text, of a replica that only computes for others' rows."""
    return _Batch(indices=[0], tokens=[[0]], prompts=[1], starts=[0], stopped=[True])


def text_after(decode: Decode, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Return what ``new`` adds to the text of ``prompt``. Many decoders drop a blank before the first word of what they
    are given."""
    before, whole = decode(prompt), decode([*prompt, *new])
    # Bytes that continue a character of the prompt change its text, too.
    return whole[len(before) :] if whole.startswith(before) else decode(new)


def _advance(advance: Advance, before: int, total: int, at: int) -> None:
    advance(before + at, total)


class Generator:
    """Generator of continuations. Collective: every rank calls ``generate`` with the same arguments."""

    def __init__(self, model: InferenceModel, decode: Decode | None = None) -> None:
        self.model, self.decode = model, decode
        self.window = model.model.seq_length

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, batch_size: int = 8, advance: Advance = silent
    ) -> list[Continuation]:
        """Return one continuation per prompt, in order, on every rank.

        The same for any layout and batch size, up to rounding: what is drawn is a function of the seed, the prompt's
        number and the token's. A context that outgrows ``model.seq_length`` drops its oldest quarter. ``advance`` is
        called with the tokens drawn for each group of batches, of the most that they may have.

        Raises:
            ConfigError: no prompt, an empty one, a token that the model does not have, or stop strings without a
                decoder.
        """
        self._check(prompts, sampling)
        ctx = self.model.ctx
        mine = list(range(ctx.index("dp"), len(prompts), ctx.size("dp")))
        batches = [
            self._batch(mine[i : i + batch_size], prompts) for i in range(0, len(mine), batch_size)
        ]
        own = len(batches)
        batches += [_idle() for _ in range(own, self.model.batches(len(prompts), batch_size))]
        lanes = ctx.topology.pp + 1 if ctx.topology.pp > 1 else 1
        most = sampling.max_new_tokens
        groups = [batches[i : i + lanes] for i in range(0, len(batches), lanes)]
        for number, group in enumerate(groups):
            self._run(group, sampling, partial(_advance, advance, number * most, len(groups) * most))
        return self._gathered(batches[:own], prompts, sampling)

    def _check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        for name in self.model.model.mixers:
            if name != ATTENTION and not MIXERS.get(name, MixerKind).memory:
                raise ConfigError(
                    f"model.mixer {name!r} has no cache of earlier tokens, which generation needs; evaluate the model, "
                    "which takes whole sequences"
                )
        if not prompts or any(len(p) == 0 for p in prompts):
            raise ConfigError("a prompt has no tokens; give at least one character")
        for number, prompt in enumerate(prompts):
            if wrong := misplaced_token(prompt, self.model.model.vocab_size):
                raise ConfigError(f"prompt {number}: {wrong}")
        if sampling.stop_strings and self.decode is None:
            raise ConfigError("stop strings need a tokenizer to decode with")

    def _batch(self, indices: list[int], prompts: Sequence[Sequence[int]]) -> _Batch:
        tokens = [list(prompts[i]) for i in indices]
        lengths = [len(t) for t in tokens]
        return _Batch(indices, tokens, lengths, [max(0, n - self.window) for n in lengths], [False] * len(indices))

    def _run(self, batches: list[_Batch], sampling: Sampling, drawn: Callable[[int], None]) -> None:
        for at in range(sampling.max_new_tokens):
            drawn(at)
            going = False
            for batch in batches:
                self._learn(batch, sampling)
                if self.model.any_in_step(not batch.finished):
                    self._pass(batch, sampling, at)
                    going = True
            if not going:
                return
        for batch in batches:
            self._learn(batch, sampling)
            batch.cache = None

    def _pass(self, batch: _Batch, sampling: Sampling, at: int) -> None:
        """Run the model for the next token of each sequence; the last stage draws it."""
        device = self.model.ctx.device
        seen = [len(t) - s for t, s in zip(batch.tokens, batch.starts)]
        if batch.cache is None or max(seen) > self.window:
            for i, n in enumerate(seen):
                if n > self.window:
                    batch.starts[i] = len(batch.tokens[i]) - self.window + self.window // 4
            contexts = [t[s:] for t, s in zip(batch.tokens, batch.starts)]
            longest = max(len(c) for c in contexts)
            batch.cache = KeyValueCache(min(self.window, longest + sampling.max_new_tokens))
            padded = torch.zeros(len(contexts), self.model.padded(longest), dtype=torch.int64)
            for row, context in zip(padded, contexts):
                row[: len(context)] = torch.tensor(context)
            out = self.model.logits(padded, cache=batch.cache, rows=[len(c) - 1 for c in contexts])
        else:
            batch.cache.at([n - 1 for n in seen], device)
            out = self.model.logits(torch.tensor([[t[-1]] for t in batch.tokens]), cache=batch.cache)
        if out is None:
            batch.drawn = torch.zeros(len(batch.tokens), dtype=torch.int64, device=device)
            return
        keys = torch.tensor([key_of("generate", sampling.seed, i) for i in batch.indices], device=device)
        batch.drawn = self.model.one_choice(draw(self.model.gather_logits(out)[0], sampling, keys, at))

    def _learn(self, batch: _Batch, sampling: Sampling) -> None:
        """Append what the last pass drew; the same on every stage."""
        if batch.drawn is None:
            return
        drawn = self.model.from_last_stage(batch.drawn).tolist()
        batch.drawn = None
        for i, token in enumerate(drawn):
            if batch.stopped[i]:
                continue
            if token in sampling.stop_ids:
                batch.stopped[i] = True
                continue
            batch.tokens[i].append(token)
            batch.stopped[i] = self._ended(batch.tokens[i], batch.prompts[i], sampling.stop_strings)

    def _ended(self, tokens: list[int], prompt: int, stops: tuple[str, ...]) -> bool:
        """Return whether a stop string is in the text after the first ``prompt`` tokens. Looked for among its last
        tokens first, the prompt's own included: a token is at least a byte."""
        if not stops or self.decode is None:
            return False
        tail = self.decode(tokens[-max(len(s.encode()) for s in stops) - 8 :])
        if not any(s in tail for s in stops):
            return False
        text = text_after(self.decode, tokens[:prompt], tokens[prompt:])
        return any(s in text for s in stops)

    def _gathered(
        self, batches: list[_Batch], prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[Continuation]:
        """Return all prompts' results on all replicas."""
        table = torch.zeros(len(prompts), sampling.max_new_tokens + 2, dtype=torch.int64)
        for batch in batches:
            for index, tokens, prompt, stopped in zip(batch.indices, batch.tokens, batch.prompts, batch.stopped):
                new = tokens[prompt:]
                table[index, : len(new) + 2] = torch.tensor([len(new), int(stopped), *new])
        rows = self.model.over_replicas(table.to(self.model.ctx.device)).tolist()
        return [self._continuation(prompt, row[2 : 2 + row[0]], bool(row[1]), sampling.stop_strings)
                for prompt, row in zip(prompts, rows)]

    def _continuation(
        self, prompt: Sequence[int], new: list[int], stopped: bool, stops: tuple[str, ...]
    ) -> Continuation:
        if self.decode is None:
            return Continuation(new, stopped)
        text = text_after(self.decode, prompt, new)
        cut = min((at for at in (text.find(s) for s in stops) if at >= 0), default=len(text))
        return Continuation(new, stopped, text[:cut])
