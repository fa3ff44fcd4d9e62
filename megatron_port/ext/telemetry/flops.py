"""Counts of a model: parameters and floating-point operations, summed over the specs of its units.

A multiply-add is two operations. Attention is counted in full (the causal half is
not taken off), the head is counted, element-wise work is not. With a heads of size
d, g key/value heads, MLP width f, sequence s, vocabulary V (unpadded), L layers:

* matrices of a layer   P = h·d·(2a + 2g) + 2·h·f  (3·h·f for swiglu)
* forward of a layer    2·s·P + 4·s²·a·d           (the second term: QKᵀ and the product with V)
* forward of the head   2·s·V·h

Where attention stays within documents, s² is Σ ℓ² over the documents' parts ℓ of a sample: s·d with d the length of the
document that a token is in, in the mean over tokens (``data.document_length``). Nothing else depends on documents.

A backward costs twice its forward. For GPT (a·d = h, g = a, f = 4h) a step on B
samples is ``72·B·s·L·h²·(1 + s/6h + V/12Lh)``, and with full recompute, where every
layer but not the head runs forward twice, ``96·B·s·L·h²·(1 + s/6h + V/16Lh)``
(Narayanan et al., arXiv 2104.04473). *Model* FLOPs do not depend on recompute (MFU);
*hardware* FLOPs do (HFU). Selective recompute adds one forward of the attention core,
``72·B·s·L·h²·(1 + 2s/9h + V/12Lh)``; Korthikanti et al. (arXiv 2205.05198) print s/3h,
which counts the repeated core three times: their HFU is higher than ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_port.core.config.features import NO_ADAPTERS, FineTuningConfig
from megatron_port.core.config.schema import DataConfig, ModelConfig
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.spec import LayerSpec, ParameterSpec
from megatron_port.core.registry import PARTS

RECOMPUTE = ("none", "selective", "full")


def document_of(data: DataConfig) -> float:
    """Return the mean length of the document that a token is in, as far as a run says it; 0: attention sees the whole
    sample, or nobody knows."""
    return data.document_length if data.attention_documents == "within" else 0.0


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model, padding left out; a tied head counts once, and so do weights that layers share."""
    spec = model_spec(model)
    ends = (*spec.embedding.parameters, *(p for p in spec.head.parameters if not p.tied))
    layers = sum(count * sum(p.numel for p in layer.parameters) for layer, count in spec.kinds())
    if spec.shared > 1:
        layers = sum(p.numel for layer in spec.layers[:: spec.shared] for p in layer.parameters)
    return sum(p.numel for p in ends) + layers


def active_count(model: ModelConfig) -> int:
    """Parameters that take part in the computation of a token: all but the experts that it is not sent to."""
    return parameter_count(model) - sum(count * layer.mlp.idle_numel for layer, count in model_spec(model).all_kinds())


def trained_count(model: ModelConfig, tuning: FineTuningConfig) -> int:
    """Return the parameters that updates change: all, or those of the adapters."""
    if not tuning.enabled:
        return parameter_count(model)
    return sum(
        count * sum(p.numel for p in _adapter_parameters(layer, tuning)) for layer, count in model_spec(model).kinds()
    )


def _adapter_parameters(layer: LayerSpec, tuning: FineTuningConfig) -> list[ParameterSpec]:
    """Return the parameters of a layer's adapters."""
    if not tuning.enabled:
        return []
    return [p for spec in PARTS.function("adapters of a layer")(layer, tuning) for p in spec.parameters]


def counted(model: ModelConfig, tuning: FineTuningConfig) -> str:
    """Return ``1,234 parameters``, and how many are trained where not all of them are, for log lines."""
    text = f"{parameter_count(model):,} parameters"
    if model.moe.enabled:
        text += f" ({active_count(model):,} of them for a token)"
    return f"{text}, frozen, and {trained_count(model, tuning):,} trained ones of adapters" if tuning.enabled else text


def adapter_flops(layer: LayerSpec, tuning: FineTuningConfig, seq: int) -> int:
    """Operations of one sample's forward that a layer's adapters add: the products with A and with B."""
    return sum(2 * seq * p.numel for p in _adapter_parameters(layer, tuning) if len(p.shape) == 2)


def unit_costs(model: ModelConfig) -> list[float]:
    """Forward matmul FLOPs per token of each unit, [embedding, layer 0, …, head], for balancing stages."""
    spec, seq = model_spec(model), model.seq_length
    layers = [float(layer.forward_flops(seq) // seq) for layer, count in spec.kinds() for _ in range(count)]
    return [0.0, *layers, float(spec.head.forward_flops(seq) // seq)]


def model_flops(model: ModelConfig, tuning: FineTuningConfig = NO_ADAPTERS, document: float = 0.0) -> float:
    """Operations that training on one sample needs (forward and backward); the numerator of MFU.

    ``document``: mean length of a token's document, which attention does not leave; 0: it sees the whole sample.
    Frozen matrices have no gradient of their own: two products, not three.
    """
    spec, seq = model_spec(model), model.seq_length
    layers = sum(count * layer.forward_flops(seq, document) for layer, count in spec.kinds())
    whole = 3 * (spec.embedding.forward_flops(seq) + layers + spec.head.forward_flops(seq))
    if not tuning.enabled:
        return whole
    added = sum(
        count * (3 * adapter_flops(layer, tuning, seq) - 2 * seq * layer.matmul_numel) for layer, count in spec.kinds()
    )
    return whole + added - spec.head.forward_flops(seq)


def causal_flops(model: ModelConfig, tuning: FineTuningConfig = NO_ADAPTERS, document: float = 0.0) -> float:
    """:func:`model_flops` with half of attention's: of each pair of positions only the later one sees the other."""
    cores = sum(
        count * layer.mixer.pair_flops(model.seq_length, document) for layer, count in model_spec(model).kinds()
    )
    return model_flops(model, tuning, document) - 3 * cores / 2


def attention_counted(model: ModelConfig, document: float = 0.0) -> str:
    """Return which operations of attention :func:`model_flops` counts, in words, to be printed beside MFU."""
    seen = f"all pairs of {model.seq_length:,} positions"
    if document and document < model.seq_length:
        seen = f"all pairs of positions within documents of {document:,.0f} tokens"
    windows = {layer.mixer.window for layer, _ in model_spec(model).kinds()} - {0}
    if windows:
        seen += f", in windows of {min(windows):,} where a layer has one"
    return f"attention counted in full: {seen}, causal or not"


def hardware_flops(
    model: ModelConfig, recompute: str = "none", tp: int = 1, dropped: Sequence[Sequence[str]] = (),
    tuning: FineTuningConfig = NO_ADAPTERS, document: float = 0.0, *, chunked_head: bool = False,
) -> float:
    """Operations that are executed for one sample; the numerator of HFU.

    ``recompute``: ``none``; ``selective`` adds one forward of the attention core of every
    layer; ``full`` adds one forward of every layer (not of the head). ``dropped``: single sites
    that each layer recomputes (``memory.sites``). Each of ``tp`` tensor-parallel
    ranks projects at least one key/value head, so with fewer heads some are projected several times. ``document``: as
    in :func:`model_flops`. ``chunked_head``: logits are made once more in the backward pass.

    Raises ValueError for an unknown ``recompute``.
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"unknown recompute {recompute!r}; one of {', '.join(RECOMPUTE)}")
    seq, total, passes = model.seq_length, model_flops(model, tuning, document), 2 if tuning.enabled else 3
    for layer, count in model_spec(model).all_kinds():
        copied = 2 * seq * layer.copied_numel(tp)
        forward = layer.forward_flops(seq, document) + copied + adapter_flops(layer, tuning, seq)
        core = layer.mixer.flops(seq, document)
        always = sum(part.flops(seq, document) for part in layer.mixer.parts if part.recomputes)
        again = {"none": always, "selective": core, "full": forward + always}
        total += count * (again[recompute] + passes * copied)
    if chunked_head:
        head = model_spec(model).head
        total += (1 + len(head.predictions)) * 2 * seq * head.weight.numel
    return total + sum(
        site_flops(layer, site, seq, tp, document)
        for layer, sites in zip(model_spec(model).layers, dropped) for site in sites
    )


def site_flops(layer: LayerSpec, site: str, seq: int, tp: int = 1, document: float = 0.0) -> float:
    """Operations of one sample's forward that make a site of a layer again; 0 for element-wise work."""
    projections = sum(p.weight_numel for p in layer.mixer.projections)
    matrices = {
        "qkv": projections + layer.copied_numel(tp), "hidden": layer.dense.up.weight_numel if layer.mlp.linears else 0,
        "residual": sum(part.output.weight_numel for part in layer.mixer.parts),
    }
    return layer.mixer.flops(seq, document) if site == "core" else 2 * seq * matrices.get(site, 0)
