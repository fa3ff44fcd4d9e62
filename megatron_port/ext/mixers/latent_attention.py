"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries, keys and values by way of small latents.

The products onto latents are not split: every tensor-parallel rank has them whole, and under sequence parallelism
applies them to its own tokens. Those from latents to heads are split by head, and gather the latents, which are smaller
than the input. Beyond that it is :class:`SelfAttention` of as many key/value heads as heads: what this module gives it
is the packed projection of heads of ``head_size`` elements, with zeros behind the values where they are smaller.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_port.core.dist.collectives import enter_region
from megatron_port.core.model.attention import SelfAttention
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.layers import Norm
from megatron_port.core.model.spec import AttentionSpec
from megatron_port.ext.mixers.latent_spec import LatentAttentionSpec


class LatentAttention(SelfAttention):
    """Self-attention [seq(/tp), batch, hidden] → same shape, without the bias of ``output``; heads / tp on each rank.

    The elements of a head's query and key are: the first halves of the rotated pairs, half of the others, the second
    halves, the rest; so that element i pairs with i + head_size / 2, as everywhere (``model.rotary``).
    """

    _split_bias = None  # its products have no bias

    def _build_projection(self, layer: str, spec: AttentionSpec, build: BuildContext) -> None:
        assert isinstance(spec, LatentAttentionSpec)
        latent = spec.latent
        self.rotary_size, self.value_size = latent.rotary_size, latent.value_size
        self.latent_size = latent.kv_norm.size
        self.group, self.sequence_parallel = build.ctx.over("tp"), build.sequence_parallel
        self.query_down = None if latent.query_down is None else build.whole(layer, latent.query_down)
        self.query_up = build.column(layer, latent.query_up)
        self.kv_down = build.whole(layer, latent.kv_down)
        self.kv_up = build.column(layer, latent.kv_up)
        self.query_norm = None if latent.query_norm is None else Norm(layer, latent.query_norm, build)
        self.kv_norm = Norm(layer, latent.kv_norm, build)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return [seq, batch, heads/tp, 3, head_size]: query, key, value (zeros behind its ``value_size`` elements)."""
        latent = x
        if self.query_down is not None and self.query_norm is not None:
            latent = self.query_norm(self.query_down(x))
        query = self.query_up(latent)
        latent, shared = self.kv_down(x).split((self.latent_size, self.rotary_size), dim=-1)
        whole = self.kv_up(self.kv_norm(latent.contiguous()))
        # Every head adds to the gradient of the shared part, and heads are on all ranks.
        shared = enter_region(shared.contiguous(), self.group, self.sequence_parallel)
        heads = *query.shape[:2], self.groups
        key, value = whole.view(*heads, -1).split((self.head_size - self.rotary_size, self.value_size), dim=-1)
        first, second = shared[:, :, None].expand(*heads, -1).chunk(2, dim=-1)
        own, rest = key.chunk(2, dim=-1)
        key = torch.cat((first, own, second, rest), dim=-1)
        value = F.pad(value, (0, self.head_size - self.value_size))
        return torch.stack((query.view(*heads, -1), key, value), dim=3)

    def values(self, out: torch.Tensor) -> torch.Tensor:
        """Return the mixed values without the padding: [..., heads/tp · head_size] → [..., heads/tp · value_size]."""
        values: torch.Tensor = out.unflatten(-1, (self.groups, self.head_size))[..., : self.value_size].flatten(-2)
        return values
