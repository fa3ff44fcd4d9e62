"""Importance of layers, heads, MLP rows, experts and features, from activations on a calibration set, on any layout.

Sums over the set's tokens, in float64:

- ``layers`` [L]: 1 - cos(a layer's input, its output), block influence (Men et al., arXiv 2403.03853);
- ``heads`` [L, a]: length of what a head gives the output projection (Muralidharan et al., arXiv 2407.14679);
- ``ffn`` [L, f]: square of what a row of the MLP gives the second projection; 0 in layers of experts;
- ``experts`` [L, E]: weight with which the router sends tokens to an expert; 0 in dense layers;
- ``hidden`` [h]: square of a feature of the norms before attention and MLP, over all layers.

Each rank adds what no other rank adds, as to ``layers.step.Tallies``, so the sums over all ranks do not depend on the
layout. Hooks of an evaluation pass gather them: the model's own modules know nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import nn

from megatron_port.core.config.model import ATTENTION
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.data.loader import RankView
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.engine.api import Engine
from megatron_port.core.errors import CheckpointError, ConfigError, EnvironmentFault
from megatron_port.core.io.files import read_regular, write_bytes
from megatron_port.core.io.logging import Advance, silent
from megatron_port.core.io.typed_json import Natural, parse_json, typed
from megatron_port.core.layers.step import Tallies, TallySpec
from megatron_port.core.model.decoder import GPTStage
from megatron_port.core.model.layers import TransformerLayer
from megatron_port.core.model.program import Watch
from megatron_port.ext.experts.moe import MoE
from megatron_port.ext.experts.router import Route
from megatron_port.tools.inference.model import Samples, perplexity


def importance_specs(model: ModelConfig) -> dict[str, TallySpec]:
    """Return the shapes of the sums of a model; all are float64."""
    layers, wide = model.num_layers, torch.float64
    specs = {
        "layers": TallySpec((layers, 1), wide), "heads": TallySpec((layers, model.num_attention_heads), wide),
        "hidden": TallySpec((1, model.hidden_size), wide),
    }
    if not all(map(model.moe.has_experts, range(layers))):
        specs["ffn"] = TallySpec((layers, model.ffn_size), wide)
    if model.moe.enabled:
        specs["experts"] = TallySpec((layers, model.moe.num_experts), wide)
    return specs


def measure_importance(
    engine: Engine, ctx: ParallelContext, model: ModelConfig, samples: Samples, *, view: RankView,
    micro_batch_size: int, advance: Advance = silent,
) -> tuple[dict[str, np.ndarray], int, float]:
    """Return (the sums, the tokens that counted, the loss in nats per token) over ``samples``. Collective, the same on
    every rank.

    Raises:
        ConfigError: the engine does not run the model's own stages, or they have another mixer than attention.
    """
    for name in model.mixers:
        if name != ATTENTION:
            raise ConfigError(f"model.mixer {name!r} has no heads whose importance is defined here, attention's do")
    chunks: Sequence[Any] = getattr(engine, "chunks", ())
    if not chunks or not all(isinstance(chunk, GPTStage) for chunk in chunks):
        raise ConfigError('importance is measured by engine "native" alone; leave out --set engine')
    sums = Tallies(importance_specs(model), ctx.device)
    with _watched(chunks, ctx, sums, len(samples)):
        found = perplexity(
            engine, ctx, samples, view=view, micro_batch_size=micro_batch_size, advance=advance
        )
    totals = {name: value.cpu().numpy() for name, value in sums.totals(ctx.world_group).items()}
    totals["layers"], totals["hidden"] = totals["layers"][:, 0], totals["hidden"][0]
    return totals, found.tokens, found.loss


@contextmanager
def _watched(chunks: Sequence[GPTStage], ctx: ParallelContext, sums: Tallies, count: int) -> Iterator[None]:
    """Add to ``sums`` in every forward pass in the block; samples from ``count`` on fill up and do not count."""
    handles: list[Any] = []
    layers = [(chunk, layer) for chunk in chunks for layer in chunk.layers if isinstance(layer, TransformerLayer)]
    try:
        for chunk, layer in layers:
            watch = _Watch(layer, chunk, ctx, sums, count)
            _show_values(layer, watch.see)
            handles.append(layer.register_forward_hook(watch.of_layer))
        yield
    finally:
        for _, layer in layers:
            _show_values(layer, None)
        for handle in handles:
            handle.remove()


def _show_values(layer: TransformerLayer, watch: Watch | None) -> None:
    """Let ``watch`` see the values of the layer's passes and of its experts'."""
    layer.watch = watch
    if isinstance(layer.mlp, MoE):
        layer.mlp.watch = watch


class _Watch:
    """What is added of one layer."""

    def __init__(
        self, layer: TransformerLayer, chunk: GPTStage, ctx: ParallelContext, sums: Tallies, count: int
    ) -> None:
        self.layer, self.step, self.sums, self.count = layer, chunk.step, sums, count
        # Without sequence parallelism tensor-parallel ranks hold the residual stream alike: one of them adds it.
        self.adds_residual = layer.attention.output.sequence_parallel or ctx.index("tp") == 0
        self.tensor_rank = ctx.index("tp")

    def see(self, name: str, value: Any) -> None:
        """Add a value that a forward pass has made, by its name in ``LayerSpec.ops`` or ``MoESpec.inner_ops``."""
        if name == "mixed":
            self._of_heads(self._counted(value))
        elif name == "mlp active":
            self._add_part("ffn", self._counted(value).square().sum(dim=(0, 1)))
        elif name in ("norm1 normed", "norm2 normed") and self.adds_residual:
            self.sums.add("hidden", 0, self._counted(value).square().sum(dim=(0, 1)))
        elif name == "route":
            self._of_router(value)

    def _counted(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` [rows, batch, ...] as float64, zero in samples that only fill up."""
        context = self.step.current
        assert context is not None  # the engine has said which micro-batch it is
        wide = values.detach().double()
        kept = [i < self.count for i in context.sample_ids]
        if all(kept):
            return wide
        mask = torch.tensor(kept, dtype=torch.float64, device=wide.device)
        return wide * mask.view(1, -1, *(1,) * (wide.dim() - 2))

    def of_layer(self, module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Add a layer's input and output: its forward hook."""
        if self.adds_residual:
            a, b = args[0].detach().double(), out.detach().double()
            cosine = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)).clamp_min(torch.finfo(torch.float64).tiny)
            self.sums.add("layers", self.layer.index, self._counted(1 - cosine).sum().view(1))

    def _of_heads(self, values: torch.Tensor) -> None:
        size = self.layer.attention.spec.value_size
        lengths = values.view(*values.shape[:2], -1, size).norm(dim=-1).sum(dim=(0, 1))
        self._add_part("heads", lengths)

    def _of_router(self, route: Route) -> None:
        context = self.step.current
        assert context is not None
        by_sample = route.weights.unflatten(0, (-1, len(context.sample_ids)))
        weights = self._counted(by_sample).flatten(0, 1)
        if route.kept is not None:
            weights = weights * route.kept
        whole = torch.zeros(self.sums.specs["experts"].shape[1], dtype=torch.float64, device=weights.device)
        self.sums.add("experts", self.layer.index, whole.index_add_(0, route.experts.flatten(), weights.flatten()))

    def _add_part(self, name: str, own: torch.Tensor) -> None:
        """Add this tensor-parallel rank's equal part of a row."""
        whole = own.new_zeros(self.sums.specs[name].shape[1])
        first = self.tensor_rank * len(own)
        whole[first : first + len(own)] = own
        self.sums.add(name, self.layer.index, whole)


# The file that measured importance is kept in: a safetensors file whose metadata says what was measured on what.
#
# It carries a hash of its tensors and of everything else that it says, and the fingerprint of the weights: what it is
# applied to must be those.

SCHEMA = "megatron_port.importance"
_MAX_BYTES = 1 << 32


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Sums over the calibration set (``compress.importance``), and what they are of."""

    scores: Mapping[str, np.ndarray]
    source: str
    """Path of the weights."""
    fingerprint: str
    """Fingerprint of the weights (``weights.readers``)."""
    corpus: str
    tokens: int
    loss: float
    """Nats per token of the model on the set."""

    def digest(self) -> str:
        """Return 32 hex digits of everything in the file."""
        return _digest(self.scores, self._facts())

    def _facts(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "scores"}


@dataclass(frozen=True)
class _Facts:
    """Fields of the file beside the scores."""

    source: str
    fingerprint: str
    corpus: str
    tokens: Natural
    loss: float


def _digest(scores: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> str:
    out = xxhash.xxh3_128(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(scores):
        values = np.ascontiguousarray(scores[name], dtype=np.float64)
        out.update(f"{name} {values.shape}".encode() + values.tobytes())
    return out.hexdigest()


def write_importance(path: Path, found: Importance) -> None:
    """Write ``path``, whole or not at all. Raises EnvironmentFault where the disk refuses."""
    scores = {name: np.ascontiguousarray(v, dtype=np.float64) for name, v in found.scores.items()}
    facts = json.dumps(found._facts(), sort_keys=True)
    data = save(scores, {"schema": SCHEMA, "facts": facts, "hash": found.digest()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, data)
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror or error}; give another --out") from None


def read_importance(path: Path) -> Importance:
    """Read and verify a file. Raises CheckpointError: it is another kind of file, or damaged."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes; such a file has at most {_MAX_BYTES}")
        raw = read_regular(path, _MAX_BYTES)
        scores = load(raw)
        told = parse_json(raw[8 : 8 + int.from_bytes(raw[:8], "little")]).get("__metadata__") or {}
        if told.get("schema") != SCHEMA:
            raise CheckpointError(f"{path}: no file of importance; `megatron-port compress measure` writes one")
        facts = parse_json(told["facts"])
        if _digest(scores, facts) != told["hash"]:
            raise CheckpointError(f"{path}: damaged: its content does not match its hash; measure again")
        return Importance(scores=scores, **vars(typed(_Facts, facts)))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged, or no file of importance: {error}") from None
