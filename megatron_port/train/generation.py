"""Continue a prompt with a trained model, split in any way.

Every rank runs its stage on the whole context for each new token; the last
stage draws the token from the gathered logits of one position and tells the
others. (No key/value cache yet: the cost of a token grows with the context.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_port.engine.module import read_local, recorded_parameters
from megatron_port.errors import ConfigError
from megatron_port.model.gpt import GPTStage
from megatron_port.parallel.counter import key_of, random_bits, uniform
from megatron_port.parallel.random import DropoutStream
from megatron_port.parallel.record import record_of
from megatron_port.pipeline.transfer import StageLink
from megatron_port.train.assemble import DTYPES, build_model
from megatron_port.train.session import Session


def filter_logits(logits: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """[vocab] with everything outside the ``top_k`` likeliest and the smallest set of mass ``top_p`` set to -inf.

    Nucleus sampling: Holtzman et al., arXiv 1904.09751. The likeliest token always stays.
    """
    out = logits.clone()
    if 0 < top_k < out.numel():
        out[out < out.topk(top_k).values[-1]] = float("-inf")
    if top_p < 1.0:
        order = out.argsort(descending=True)
        mass = torch.softmax(out[order], dim=-1).cumsum(-1)
        beyond = torch.cat((torch.zeros(1, dtype=torch.bool, device=out.device), mass[:-1] >= top_p))
        out[order[beyond]] = float("-inf")
    return out


class Generator:
    """A model on this rank, ready to continue prompts. Collective: every rank calls the same methods."""

    def __init__(self, session: Session, read: Callable[..., torch.Tensor]) -> None:
        self.session, self.ctx, self.config = session, session.ctx, session.config
        stream = DropoutStream(0, self.ctx.device)
        stream.enabled = False
        self.stage: GPTStage
        (self.stage,) = build_model(self.config, self.ctx, session.providers, stream)
        self.stage.eval()
        for record, parameter in recorded_parameters(self.stage):
            read_local(read, record, "weight", parameter)
        self.link = StageLink(self.ctx)
        self.dtype = DTYPES[self.config.precision.dtype]

    @torch.no_grad()
    def next_logits(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """Logits [vocab] (float32) after ``tokens``, on the last stage; None elsewhere."""
        tp = self.ctx.topology.tp
        # Sequence parallelism needs a length divisible by tp; what follows the last token is not seen by it.
        length = -(-len(tokens) // tp) * tp
        if self.link.previous is None:
            padded = torch.zeros(1, length, dtype=torch.int64)
            padded[0, : len(tokens)] = torch.tensor(list(tokens))
            out = self.stage(padded.to(self.ctx.device))
        else:
            out = self.stage(self.link.receive(self.stage.activation_shape(1, length), self.dtype, self.link.previous))
        if self.link.next is not None:
            self.link.send(out, self.link.next)
            self.link.drain()
            return None
        local = out[len(tokens) - 1, 0].float().contiguous()
        if self.ctx.tp_group is not None:
            parts = [torch.empty_like(local) for _ in range(tp)]
            dist.all_gather(parts, local, group=self.ctx.tp_group)
            local = torch.cat(parts)
        return local[: record_of(self.stage.head.weight).shape[0]]  # type: ignore[union-attr]

    def _draw(self, logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float, key: int, at: int) -> int:
        if temperature == 0.0:
            return int(logits.argmax())
        logits = filter_logits(logits / temperature, top_k=top_k, top_p=top_p)
        mass = torch.softmax(logits.double(), dim=-1).cumsum(-1)
        u = uniform(random_bits(torch.tensor([at], device=logits.device), key))
        return min(int(torch.searchsorted(mass, u * mass[-1])), logits.numel() - 1)

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_id: int | None = None,
    ) -> list[int]:
        """The new tokens, on every rank; the same on every layout for the same seed, up to rounding.

        Raises ConfigError when the prompt is empty.
        """
        if not prompt:
            raise ConfigError("the prompt has no tokens; give at least one character")
        tokens, window = list(prompt), self.config.model.seq_length
        key = key_of("generate", seed)
        for at in range(max_new_tokens):
            logits = self.next_logits(tokens[-window:])
            new = torch.zeros(1, dtype=torch.int64, device=self.ctx.device)
            if logits is not None:
                new[0] = self._draw(logits, temperature=temperature, top_k=top_k, top_p=top_p, key=key, at=at)
            if self.ctx.pp_group is not None:
                source = self.ctx.topology.stage_peer(self.ctx.rank, self.ctx.topology.pp - 1)
                dist.broadcast(new, src=source, group=self.ctx.pp_group)
            if int(new) == stop_id:
                break
            tokens.append(int(new))
        return tokens[len(prompt):]
