"""The plugin: ``plugins = ["gated_delta_net"]`` in a run file, with this folder on PYTHONPATH.

A gated delta net (Yang et al., arXiv 2412.06464) in place of attention, written as its formula. Each head has a state
S [d, d], which forgets by a factor a_t and learns with rate b_t what its key should give:

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t S_{t-1}ᵀ k_t)ᵀ,    o_t = S_tᵀ q_t / √d

with queries and keys of length 1, b_t = sigmoid(b), a_t = exp(-exp(A) softplus(a + bias)). Heads are divided over
tensor-parallel ranks. One position is computed after the other, so this is to read and to compare with, not to be fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_port.core.config.model import MixerKind
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.layers.spec import LinearSpec, ParameterSpec, Split
from megatron_port.core.model.decoder_spec import residual_std
from megatron_port.core.model.ops import Op
from megatron_port.core.model.spec import MixerSpec
from megatron_port.core.registry import MIXERS


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(MixerSpec):
    heads: int
    head_size: int
    packed: LinearSpec
    """Rows of each head: query, key, value, then a and b."""

    @property
    def projections(self) -> tuple[LinearSpec, ...]:
        return (self.packed,)

    @property
    def decay(self) -> ParameterSpec:
        """Logarithm A of each head's rate of forgetting."""
        return ParameterSpec(name="attention.decay", shape=(self.heads,), init="zeros", decay=False, split=Split(0))

    @property
    def decay_bias(self) -> ParameterSpec:
        return ParameterSpec(name="attention.decay_bias", shape=(self.heads,), init="ones", decay=False, split=Split(0))

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        return (self.decay, self.decay_bias, *self.packed.parameters, *self.output.parameters)

    def flops(self, seq: int, document: float = 0.0) -> float:
        return 7.0 * seq * self.heads * self.head_size**2  # Sᵀk, the update and its decay, Sᵀq

    def ops(self, source: str) -> tuple[Op, ...]:
        return (
            Op(kind="column", run="attention.packed", site="qkv", reads=(source,), writes=("packed",),
               part=self.packed),
            # The states are not kept: they are computed again in the backward pass, from the projection.
            Op(kind="gated delta rule", run="attention.mix", site="core", reads=("packed",), writes=("mixed",),
               features=self.heads * self.head_size, keeps=("packed",)),
        )

    def build(self, layer: str, build: Any) -> Any:
        import torch  # not needed by the commands that plan and check
        from torch.nn.functional import normalize, softplus

        from megatron_port.ext.memory.recompute import recompute

        heads, size = self.heads // build.ctx.size("tp"), self.head_size

        class Module(torch.nn.Module):
            def __init__(self, spec: GatedDeltaNet) -> None:
                super().__init__()
                self.step = build.step
                self.decay = build.per_head(spec.decay, layer)
                self.decay_bias = build.per_head(spec.decay_bias, layer)
                self.packed = build.column(layer, spec.packed)
                self.output = build.row(layer, spec.output)

            def mix(self, packed: torch.Tensor) -> torch.Tensor:
                """[seq, batch, heads/tp · (3 d + 2)] → [seq, batch, heads/tp · d]"""
                if torch.is_grad_enabled():
                    return recompute(self.recur, packed, step=self.step)
                return self.recur(packed)

            def recur(self, packed: torch.Tensor) -> torch.Tensor:
                rows = packed.unflatten(-1, (heads, 3 * size + 2))
                q, k, v, a, b = rows.split((size, size, size, 1, 1), dim=-1)
                q, k, rate = normalize(q, dim=-1) * size**-0.5, normalize(k, dim=-1), b.sigmoid()
                forget = (-self.decay.exp()[:, None] * softplus(a + self.decay_bias[:, None])).exp()
                state, out = packed.new_zeros(*packed.shape[1:-1], heads, size, size), []
                for t in range(packed.shape[0]):
                    state = state * forget[t][..., None]
                    learned = rate[t] * (v[t] - torch.einsum("bhkv,bhk->bhv", state, k[t]))
                    state = state + k[t][..., None] * learned[..., None, :]
                    out.append(torch.einsum("bhkv,bhk->bhv", state, q[t]))
                return torch.stack(out).flatten(-2)

        return Module(self)


def gated_delta_net(model: ModelConfig, index: int) -> GatedDeltaNet:
    """Return the mixer of a layer; all layers have the same."""
    heads, size = model.num_attention_heads, model.head_size
    linear = partial(LinearSpec, bias=False)
    return GatedDeltaNet(
        heads=heads, head_size=size,
        packed=linear(name="attention.packed", inputs=model.hidden_size, outputs=heads * (3 * size + 2),
                      parallel="column", std=model.matrix_std),
        output=linear(name="attention.output", inputs=heads * size, outputs=model.hidden_size, parallel="row",
                      std=residual_std(model)),
    )


MIXERS.add("gated_delta_net", MixerKind(gated_delta_net))
