"""Sections of features: fields and their help. What contradicts a feature lies with it, in its package of ext."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from megatron_port.core.config.ranges import Count, Fraction, NonNegative, PathSetting, Positive, Share, Size, at_least


# Section ``[distillation]``: a teacher whose predictions the model learns.
@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Learning from a teacher: the loss of a token is alpha · CE + (1 - alpha) · T² · KL, with both distributions of KL
    at temperature T (Hinton et al., arXiv 1503.02531; engine native; docs/compression.md)."""

    teacher: PathSetting = ""
    """The teacher: a Hugging Face folder (safetensors), a run folder, or a checkpoint, of any layout. Its layers are
    split over the same ranks as the model's. Empty: there is none."""
    logits: PathSetting = ""
    """Folder that `distill logits` writes: the teacher's most likely tokens at every position of the training order.
    Where it is set, training reads it instead of running the teacher."""
    alpha: Fraction = 0.5
    """Share of the cross-entropy of the data; the rest is the teacher's."""
    temperature: Positive = 1.0
    """T, by which the logits of both are divided in KL."""
    divergence: Literal["forward", "reverse"] = "forward"
    """forward (KL of the teacher from the model: cover all that the teacher does) | reverse (KL of the model from the
    teacher: do only what the teacher does; Gu et al., arXiv 2306.08543)"""

    @property
    def enabled(self) -> bool:
        """Whether the loss has a teacher's part."""
        return bool(self.teacher or self.logits)

    @property
    def online(self) -> bool:
        """Whether the teacher runs beside the model."""
        return bool(self.teacher) and not self.logits


NO_TEACHER = DistillationConfig()


# Section ``[fine_tuning]``: low-rank adapters that are trained beside frozen weights.

@dataclass(frozen=True, kw_only=True)
class FineTuningConfig:
    """Low-rank adapters: the weights of checkpoint.initial_weights are frozen, and what is trained and saved are two
    thin matrices beside each of the layers' matrices (engine native; docs/fine-tuning.md)."""

    method: Literal["none", "lora", "dora"] = "none"
    """none (all weights are trained) | lora (W + s B A; Hu et al., arXiv 2106.09685) | dora (its rows scaled to trained
    lengths; Liu et al., arXiv 2402.09353)"""
    rank: Count = 8
    """Rows of A and columns of B, r."""
    alpha: Positive = 16.0
    """The factor s is alpha / r."""
    rslora: bool = False
    """The factor s is alpha / sqrt(r) (Kalajdzievski, arXiv 2312.03732)."""
    dropout: Fraction = 0.0
    """Probability, on what A reads (lora)."""
    targets: tuple[str, ...] = ()
    """Matrices with an adapter: query, key, value, output, gate, up, down; for latent attention query_down, query_up,
    kv_down, kv_up instead of the first three. Empty: all that the model has."""
    adapters: PathSetting = ""
    """PEFT folder that the adapters start from; empty: A is drawn and B is zero, as in PEFT."""

    @property
    def enabled(self) -> bool:
        """Whether weights are frozen."""
        return self.method != "none"

    @property
    def scale(self) -> float:
        """Factor of the product of B and A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


NO_ADAPTERS = FineTuningConfig()


# Section ``[quantisation]``: weights that compute as if they had few bits while they are trained.

@dataclass(frozen=True, kw_only=True)
class QuantisationConfig:
    """Training that knows of the few bits which the layers' linears will have: products see the nearest value that
    such bits can say, and gradients pass straight through (engine native; docs/compression.md)."""

    weights: Literal["none", "int8", "int4", "binary"] = "none"
    """none | int8 | int4 (a scale per group, so that no value is beyond the range) | binary (plus or minus the mean
    size of the group; Rastegari et al., arXiv 1603.05279)"""
    group_size: Size = 32
    """Neighbours along the inputs that share a scale; a divisor of each linear's inputs on a rank."""

    @property
    def enabled(self) -> bool:
        """Whether products see other weights than the optimizer."""
        return self.weights != "none"


NO_QUANTISATION = QuantisationConfig()


# Section ``[sparsity]``: matrices with elements that stay zero.

@dataclass(frozen=True, kw_only=True)
class SparsityConfig:
    """Matrices whose smallest elements are zero from a run's start on (engine native; docs/compression.md)."""

    method: Literal["none", "magnitude", "2:4"] = "none"
    """none | magnitude (the share ``ratio`` of each matrix, wherever) | 2:4 (of each four neighbours along the inputs
    the two smallest: what sparse tensor cores multiply)"""
    ratio: Fraction = 0.5
    """With magnitude: share of zeros."""
    targets: tuple[str, ...] = ()
    """Patterns of the names of the layers' matrices (layers.*.mlp.*); empty: all of them, without routers."""

    @property
    def enabled(self) -> bool:
        """Whether anything is zero."""
        return self.method != "none"


NO_SPARSITY = SparsityConfig()


# Section ``[offload]``: training state that lives in host memory or on a disk.

@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Training state outside of the device's memory (engine native; docs/offload.md). Changes no number."""

    optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where masters and the rule's state are held and updated: none (on the device) | cpu (host memory, by the own
    kernels for CPUs, or torch's ops where the rule has none) | nvme (files in nvme_path, likewise)"""
    fraction: Share = 1.0
    """Share of the elements whose masters and moments are offloaded, by whole buckets, last layers first; the rest is
    updated on the device."""
    weights: Literal["none", "cpu"] = "none"
    """Where this rank's shards of the weights are held under ZeRO stage 3: none (on the device) | cpu (host memory,
    from which each gather copies them)"""
    buffers: Count = 4
    """Staging buffers in host memory, each as large as a bucket's share needs: the amount of data in flight."""
    nvme_path: PathSetting = ""
    """Folder on a fast local disk for nvme, with one file of fixed size per rank and kind of state. The files are
    scratch and vanish with the process; checkpoints hold the state."""


# The memory part of a run file: what a rank keeps, and where. Changes no number.

@dataclass(frozen=True, kw_only=True)
class ActivationsConfig:
    """Tensors of its forward pass that a layer keeps for its backward pass (docs/activations.md)."""

    policy: Literal["none", "selective", "full", "plan", "profile"] = "none"
    """none (keep everything) | selective (recompute the attention core) | full (recompute each layer from its input) |
    plan (for each stage, free the missing memory in the least time: recompute, swap to the host, or partition over
    tensor-parallel ranks; needs a cluster with [hardware]) | profile (like plan, from measurements of the first
    steps, which recompute everything)"""
    budget: NonNegative = 0.0
    """plan, profile: GiB of one device for activations and the memory of a layer; 0: what cluster.memory_gb leaves."""
    measure: Count = 3
    """profile: steps that an attempt measures."""
    layers: tuple[str, ...] = ()
    """plan: sites that each layer does not keep, joined by +, one entry per layer: SITE (recompute), SITE:swap or
    SITE:partition; empty: the planner finds them when the run starts, and they are written to its folder."""
    head_chunk: Annotated[int, at_least(-1)] = 0
    """Tokens whose logits exist at once, made again in the backward pass, so that none are kept; 0: all; -1: chunks of
    256 MiB of logits where whole ones would not fit, else 0."""

    @property
    def recompute(self) -> Literal["none", "selective", "full"]:
        """Policy of recompute that all layers share."""
        return "none" if self.policy == "plan" or self.policy == "profile" else self.policy

    @property
    def choices(self) -> tuple[tuple[str, ...], ...]:
        """Sites that each layer does not keep (``layers`` taken apart) under policy plan; empty under another, or as
        long as nothing is found."""
        return tuple(tuple(filter(None, sites.split("+"))) for sites in self.layers) if self.policy == "plan" else ()
