"""Specs of what mixes the positions of a layer. Plain Python, without torch.

``model.mixer`` names it (``registry.MIXERS``): the package's own is attention (``model.attention_spec``), and plugins
add others. Parameter counts, FLOPs, memory, the planner's seconds and the layer's forward pass ask the spec, so that a
mixer is trained, counted, planned and saved from its own statement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_port.core.model.ops import Op
from megatron_port.core.model.parameter_spec import LinearSpec, NormSpec, ParameterSpec

if TYPE_CHECKING:
    from megatron_port.core.model.attention_spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class MixerSpec(ABC):
    """Projections from the layer's input, the core between them, and the output projection.

    The module that :meth:`build` returns is the layer's ``attention``: it has ``output``, and what :meth:`ops` run.
    Names of parameters begin with ``attention.``.
    """

    module: ClassVar[str]
    """Where the class of its module is, ``"module:attribute"``, imported when a layer is built."""
    output: LinearSpec
    """Reads what the core mixed; row-parallel."""
    window: int = 0
    """Positions that one sees at most; 0: all before it."""

    @property
    @abstractmethod
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """In the order of the modules; names relative to the layer."""

    @property
    @abstractmethod
    def projections(self) -> tuple[LinearSpec, ...]:
        """Products with the layer's input, or with what they made of it, in the order of the forward pass."""

    @abstractmethod
    def flops(self, seq: int, document: float = 0.0) -> float:
        """Operations of the core in one sample's forward, projections left out. ``document``: tokens of the document
        that a token is in, in the mean over tokens; 0: the sample is one."""

    @abstractmethod
    def ops(self, source: str) -> tuple[Op, ...]:
        """What makes ``mixed``, which ``output`` reads, of the value ``source``."""

    def build(self, layer: str, build: Any) -> Any:
        """Return the module (torch.nn.Module). ``layer``: before the names of its parameters; ``build``: the context
        (``model.build.BuildContext``)."""
        where, _, name = self.module.partition(":")
        return getattr(import_module(where), name)(layer, self, build)

    @property
    def attention(self) -> AttentionSpec | None:
        """The softmax over scores of pairs of positions; None: the core is something else."""
        return None

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """In the order of the forward pass."""
        return *self.projections, *self.output.factors

    def pair_flops(self, seq: int, document: float = 0.0) -> float:
        """The operations among :meth:`flops` of which a causal core needs half: those of pairs of positions."""
        return 0.0

    @property
    def entry_rank(self) -> int:
        """Features that tensor-parallel ranks exchange at the entry in place of the residual stream's; 0: those."""
        return 0

    @property
    def mixed_features(self) -> int:
        """Elements per token that the core returns."""
        return self.output.inputs

    @property
    def up_projections(self) -> tuple[LinearSpec, ...]:
        """Projections from latents to heads."""
        return ()

    def packed_features(self, tp: int) -> int:
        """Elements per token of what the core reads on ``tp`` ranks together, copies included."""
        return sum(linear.outputs_held(tp) for linear in self.projections if linear.parallel == "column")

    def normalized_features(self, tp: int) -> int:
        """Elements per token that norms of what the core reads see on ``tp`` ranks together."""
        return 0

    @property
    def norms_over_ranks(self) -> int:
        """Norms whose mean is over the heads of all tensor-parallel ranks."""
        return 0

    @property
    def latent_norms(self) -> tuple[NormSpec, ...]:
        """Norms of latents, which every tensor-parallel rank has whole."""
        return ()
