"""Attention and Mamba-2 beside one another, as Falcon-H1 has them (arXiv 2507.22448): the mixer ``attention_mamba2``.

Both read the layer's normed input, and their results are added, each by its own output projection and its own factor.
Plain Python, without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from megatron_port.core.config.model import ModelConfig
from megatron_port.core.layers.spec import LinearSpec, ParameterSpec
from megatron_port.core.model.decoder_spec import attention_spec
from megatron_port.core.model.ops import Op
from megatron_port.core.model.spec import AttentionSpec, GroupedAttentionSpec, MixerSpec
from megatron_port.ext.mixers.mamba2 import KIND as MAMBA2
from megatron_port.ext.mixers.mamba2 import Mamba2Spec, mamba2
from megatron_port.ext.mixers.recurrent_spec import RecurrentKind


@dataclass(frozen=True, kw_only=True)
class AttentionMamba2Spec(GroupedAttentionSpec):
    """Grouped attention that has a recurrence beside it, whose parameters have the names that they have alone."""

    module: ClassVar[str] = "megatron_port.ext.mixers.beside:AttentionBesideRecurrent"
    recurrent: Mamba2Spec

    @property
    def attention(self) -> AttentionSpec:
        return GroupedAttentionSpec(**{name: part for name, part in vars(self).items() if name != "recurrent"})

    @property
    def parts(self) -> tuple[MixerSpec, ...]:
        return self.attention, self.recurrent

    @property
    def units(self) -> int:
        """Parts of the recurrence that tensor-parallel ranks divide."""
        return self.recurrent.units

    @property
    def projections(self) -> tuple[LinearSpec, ...]:
        return *super().projections, *self.recurrent.projections

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        return *super().linears, *self.recurrent.output.factors

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        return *super().parameters, *self.recurrent.parameters

    def flops(self, seq: int, document: float = 0.0) -> float:
        return super().flops(seq, document) + self.recurrent.flops(seq, document)

    def pair_flops(self, seq: int, document: float = 0.0) -> float:
        return super().flops(seq, document)

    @property
    def passed(self) -> tuple[float, float, float]:
        return self.recurrent.passed

    def ops(self, source: str) -> tuple[Op, ...]:
        heads, scores = super().ops(source)
        project, mix = (
            replace(op, run=f"attention.recurrent.{op.run.removeprefix('attention.')}")
            for op in self.recurrent.ops(source)
        )
        output = Op(kind="row", run="attention.recurrent.output", site="residual", reads=("state mixed",),
                    writes=("beside",), part=self.recurrent.output)
        mix = replace(mix, reads=("state packed",), writes=("state mixed",), keeps=("state packed",))
        return replace(project, writes=("state packed",)), heads, mix, scores, output


def attention_mamba2(model: ModelConfig, index: int) -> AttentionMamba2Spec:
    """Return the mixer of a layer (from 0). Other attention is refused by name (:func:`_faults`), as checks may ask for
    the spec before."""
    plain = attention_spec(replace(model, attention_gate=False, kv_lora_rank=0), index)
    recurrent = mamba2(model, index)
    output = replace(recurrent.output, name="attention.recurrent_output")
    return AttentionMamba2Spec(**vars(plain), recurrent=replace(recurrent, output=output))


_OTHERS = ("add_bias", "attention_gate", "kv_lora_rank", "output_rank", "qkv_rank")
_OF_ATTENTION = (
    "attention_chunk", "attention_dropout", "attention_pattern", "attention_scale", "attention_sinks",
    "attention_softcap", "num_query_groups", "qk_norm", "qkv_bias", "rope_pattern", "sliding_window",
    "num_attention_heads", "head_dim",
)


def _faults(model: ModelConfig) -> Iterator[str]:
    yield from MAMBA2.faults(model)
    for name in _OTHERS:
        if value := getattr(model, name):
            shown = str(value).lower() if isinstance(value, bool) else value
            yield f"model.{name} {shown} is not built for model.mixer 'attention_mamba2'; leave it out"


KIND = RecurrentKind(
    attention_mamba2, faults=_faults, settings=frozenset(_OF_ATTENTION), reads=MAMBA2.reads | {"attention_multiplier"},
)
