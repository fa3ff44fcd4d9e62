"""Memory of the tokens so far, for generation: a token then costs one position, not the whole context.

Attention keeps keys and values, mixers with a state keep that. A :class:`KeyValueCache` belongs to one batch and serves
all layers of a stage. A :class:`CacheSlot` holds the one in use and is installed in a stage's mixers and embedding; the
model itself knows of no cache. Sequences may have different lengths: prompts are padded on the right, each has its own
position, and what lies beyond it is overwritten before it is ever looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_port.core.layers.attention import Attention, visible_softmax
from megatron_port.core.layers.fused import product
from megatron_port.core.layers.providers import Providers
from megatron_port.core.model.decoder import GPTStage
from megatron_port.core.model.layers import Embedding
from megatron_port.core.model.rotary import RotaryTables
from megatron_port.core.model.spec import AttentionSpec
from megatron_port.ext.context.attention import GatherKeys


@runtime_checkable
class CachingAttention(Protocol):
    """Parts of a layer's attention that generation uses and replaces (``model.attention.SelfAttention`` has it); a
    mixer without these reads whole sequences for each token."""

    name: str
    spec: AttentionSpec
    sinks: torch.Tensor | None
    rotary: RotaryTables | None
    providers: Providers
    context: Any
    core_arguments: Callable[..., tuple[torch.Tensor, ...]]
    """From the layer's input to what ``attend_to`` takes."""
    attend_to: Callable[..., torch.Tensor]

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return the packed projection [seq, batch, groups/tp, heads of a group + 2, d]."""

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values of the packed projection, rotated under rope."""

    def attend_split(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return what ``attend_to`` does, from what ``split`` returned."""

    def values(self, out: torch.Tensor) -> torch.Tensor:
        """Return what the output projection takes, from the mixed values."""


@runtime_checkable
class RemembersTokens(Protocol):
    """A mixer with a state that generation keeps (``mixers.recurrent.Recurrent``)."""

    name: str
    mix: Callable[[torch.Tensor], torch.Tensor]

    def continued(
        self, packed: torch.Tensor, memory: Any, lengths: torch.Tensor | None
    ) -> tuple[torch.Tensor, Any]:
        """Return what ``mix`` does, and the memory behind each sequence's last token."""


class KeyValueCache:
    """Cache of one batch's keys and values, and of the memory of mixers with a state.

    Run the stage on the prompts; then, for each new token, call ``at`` and run the stage on [batch, 1] tokens.

    Memory: 2 · layers · batch · groups · capacity · head size elements on each rank.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Positions that it can hold."""
        self.positions: torch.Tensor | None = None
        """int64 [batch]: position of the current token; None during prefill."""
        self._seen: torch.Tensor | None = None
        self._layers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.memories: dict[str, Any] = {}
        self.lengths: torch.Tensor | None = None
        """int64 [batch]: tokens of each prompt, while they are read."""

    @property
    def length(self) -> int:
        """Positions that the current token attends to in the longest sequence, itself included."""
        return 0 if self._seen is None else self._seen.shape[0]

    def at(self, positions: Sequence[int], device: torch.device) -> None:
        """Set the positions (from 0) of the next pass, which has one token per sequence."""
        last = max(positions)
        if last >= self.capacity:
            raise ValueError(f"position {last} of a cache of {self.capacity}")
        self.positions = torch.tensor(list(positions), dtype=torch.int64, device=device)
        self._seen = torch.arange(last + 1, device=device)

    def store(self, layer: str, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store keys and values [seq, batch, groups, d] of the prompts; what is padded beyond the capacity is not
        kept."""
        seq, batch, groups, size = min(len(k), self.capacity), *k.shape[1:]
        kept = []
        for x in (k, v):
            held = x.new_zeros(batch, groups, self.capacity, size)  # not empty: 0 times what lies there must be 0
            held[:, :, :seq] = x[:seq].permute(1, 2, 0, 3)
            kept.append(held)
        self._layers[layer] = (kept[0], kept[1])

    def _visible(self, window: int, chunk: int) -> torch.Tensor:
        """bool [batch, 1, 1, length]: positions that each sequence's token sees; without ``window`` and ``chunk`` all
        up to its own."""
        assert self.positions is not None and self._seen is not None
        last = self.positions[:, None]
        visible = self._seen <= last
        if window:
            visible &= self._seen > last - window
        if chunk:
            visible &= self._seen >= last - last % chunk
        return visible[:, None, None, :]

    def attend(
        self, attention: CachingAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Compute the attention of one token per sequence over itself and all tokens before it that it sees.

        q [1, batch, heads, d], k and v [1, batch, groups, d] → [1, batch, heads · d]. The query heads of a group are
        the rows of one product, so keys and values are never repeated.
        """
        keys, values = self._layers[attention.name]
        _, batch, heads, size = q.shape
        groups, row, spec = k.shape[2], torch.arange(q.shape[1], device=q.device), attention.spec
        keys[row, :, self.positions] = k[0]
        values[row, :, self.positions] = v[0]
        q, visible = q.reshape(batch, groups, heads // groups, size), self._visible(spec.window, spec.chunk)
        keys, values = keys[:, :, : self.length], values[:, :, : self.length]
        if not spec.softcap and attention.sinks is None:
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible)
        else:
            scores = product(q * size**-0.5, keys.mT).view(batch, heads, 1, self.length)
            probs = visible_softmax(scores, visible, softcap=spec.softcap, sinks=attention.sinks)
            out = product(probs.view(batch, groups, heads // groups, self.length), values)
        return out.reshape(1, batch, heads * size)


class CacheSlot:
    """Holder of the cache in use; the attention and embedding of the stages it is installed in read and fill it."""

    def __init__(self) -> None:
        self._now: KeyValueCache | None = None

    def install(self, stage: GPTStage, context: dist.ProcessGroup | None = None) -> None:
        """Let the stage's attention and learned positions use the cache of the moment; without one nothing changes.

        ``context``: the context-parallel ranks, which gather keys and values while prompts are read.
        """
        for module in stage.modules():
            if isinstance(module, CachingAttention):
                module.core_arguments = partial(self._core_arguments, module, module.core_arguments)
                module.attend_to = partial(self._attend_to, module, module.attend_to)
                stores = partial(self._store_and_attend, module.name, module.providers.attention)
                module.providers = replace(module.providers, attention=stores)
                if context is not None:
                    module.context = GatherKeys(context, stores)
            elif isinstance(module, RemembersTokens):
                module.mix = partial(self._mix, module, module.mix)
            elif isinstance(module, Embedding):
                module.position_rows = self._position_rows

    @contextmanager
    def using(self, cache: KeyValueCache) -> Iterator[None]:
        """Passes of the stage in the body read and fill ``cache``."""
        self._now = cache
        try:
            yield
        finally:
            self._now = None

    def _core_arguments(
        self, attention: CachingAttention, own: Callable[..., tuple[torch.Tensor, ...]], x: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of one token of each sequence under a filled cache, else of whole sequences."""
        cache = self._now
        if cache is None:
            return own(x)
        y = attention.project(x)
        if cache.positions is not None:
            return _split_at(attention, y, cache.positions, cache.length)
        return attention.split(y)

    def _attend_to(
        self, attention: CachingAttention, own: Callable[..., torch.Tensor], *arguments: torch.Tensor
    ) -> torch.Tensor:
        """Attention of one token of each sequence under a filled cache; else over whole sequences, which fill it."""
        cache = self._now
        if cache is None:
            return own(*arguments)
        if cache.positions is not None:
            return attention.values(cache.attend(attention, *arguments))
        return attention.attend_split(*arguments)

    def _store_and_attend(
        self, name: str, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Call the provider, whose keys and values are those of all positions on every context-parallel rank."""
        if self._now is not None:
            self._now.store(name, k, v)
        return attention(q, k, v, **options)

    def _mix(
        self, mixer: RemembersTokens, own: Callable[[torch.Tensor], torch.Tensor], packed: torch.Tensor
    ) -> torch.Tensor:
        """Mix one token of each sequence from what is remembered of those before it; else whole sequences."""
        cache = self._now
        if cache is None:
            return own(packed)
        memory = None if cache.positions is None else cache.memories[mixer.name]
        out, cache.memories[mixer.name] = mixer.continued(packed, memory, cache.lengths)
        return out

    def _position_rows(self, embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
        """Learned embeddings of x [rows, batch, hidden]; under a filled cache it has one row."""
        if self._now is None or self._now.positions is None:
            return embedding.own_positions(x)
        assert embedding.position is not None
        return embedding.position[self._now.positions][None]


def _split_at(
    attention: CachingAttention, y: torch.Tensor, positions: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split one token of each sequence [1, batch, ...] into q, k and v, each rotated to its own position.

    ``positions`` int64 [batch], all below ``length``.
    """
    if attention.rotary is None:
        return attention.split(y)
    cos, sin = attention.rotary.rows_at(positions, length)
    # Rows are rotated one by one, so the batch stands in for the sequence.
    q, k, v = attention.providers.split_rotary(y.view(-1, 1, *y.shape[2:]), cos, sin)
    return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
