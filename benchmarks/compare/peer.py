"""What the comparison asks of each implementation, and which there are."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.compare.sizes import Size
from benchmarks.compare.weights import Weights

REFERENCE = "torch"
"""Plain torch without compilation: what every other peer's numbers are compared with."""


class Unable(Exception):
    """This peer cannot train this size here; the message says why."""


@dataclass
class About:
    """What a peer reports of itself."""

    settings: dict[str, str] = field(default_factory=dict)
    """How it is used, as its documentation says is fastest."""
    handicap: str = ""
    """Why it does not run at its documented best here; then it is listed, not counted."""
    favour: str = ""
    """What it does not do that the others do; it is counted all the same."""


class Step(Protocol):
    """A built peer."""

    about: About

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
        """One optimizer step on a batch: (mean loss before the update, gradient norm before clipping), floats or
        scalars on the device. Of a stack of layers: (output, gradient of the input). Waits for nothing if it can."""


class LayerStep(Step, Protocol):
    """A built stack of layers."""

    def gradient_norm(self) -> Tensor:
        """Of all weights' gradients of the first step: they were computed, and are the right ones."""


@dataclass(frozen=True)
class Peer:
    """A row of the table: module and the options that ``build(size, weights, device, **options)`` gets."""

    module: str
    options: dict[str, Any]
    says: str
    ours: bool = False
    precision: str = ""
    """fp8 (products of the layers in 8 bits), narrow (all state in bf16): more rounding than the others, so a tolerance
    of its own (``run.TOLERANCE``)."""
    needs: tuple[str, ...] = ()
    """Modules without which no process need be started."""


PEERS: dict[str, Peer] = {
    "ours": Peer("ours", {"own_kernels": True}, "this project, own kernels", True),
    "ours-recorded": Peer("ours", {"own_kernels": True, "graphs": "step"}, "ours, steps recorded and replayed", True),
    "ours-lt": Peer("ours", {"own_kernels": True, "graphs": "step", "products": "lt"},
                    "the same, products by cublasLt's or hipBLASLt's fastest algorithms", True),
    "ours-no-kernels": Peer("ours", {"own_kernels": False}, "this project, torch's ops", True),
    "ours-fp8": Peer("ours", {"own_kernels": True, "fp8": "tensorwise"}, "ours, layers in 8 bits, a scale a tensor",
                     True, "fp8"),
    "ours-fp8-rowwise": Peer("ours", {"own_kernels": True, "fp8": "rowwise"}, "ours, layers in 8 bits, a scale a row",
                             True, "fp8"),
    "torch": Peer("plain", {"compile": ""}, "plain torch, eager"),
    "torch-compile": Peer("plain", {"compile": "default"}, "plain torch, torch.compile"),
    "torch-compile-max": Peer("plain", {"compile": "max-autotune"}, "plain torch, compiled and tuned, CUDA graphs"),
    "torch-narrow": Peer("plain", {"compile": "", "narrow": True}, "plain torch all in bf16, fused AdamW, CUDA graphs",
                         precision="narrow"),
    "hf-deepspeed": Peer("hf_deepspeed", {"compile": False}, "transformers, DeepSpeed ZeRO-1", needs=("transformers",)),
    "hf-deepspeed-compile": Peer("hf_deepspeed", {"compile": True}, "the same with engine.compile()",
                                 needs=("transformers",)),
    "torchtitan": Peer("titan", {}, "torchtitan, FSDP2 and per-layer compilation", needs=("torchtitan",)),
    "megatron-core": Peer("megatron_core", {}, "Megatron-core, Transformer Engine where it is",
                          needs=("megatron.core",)),
}


def build(name: str, size: Size, device: torch.device) -> Step:
    """Import a peer's adapter and build it with the common weights.

    Raises:
        Unable: it cannot be had, or cannot train this size.
    """
    peer = PEERS[name]
    adapter = importlib.import_module(f"benchmarks.compare.{peer.module}")
    made: Step = adapter.build(size, Weights(size.model, device), device, **peer.options)
    return made


def autocast_dtype(size: Size) -> torch.dtype:
    """Of products."""
    return torch.bfloat16 if size.dtype == "bf16" else torch.float32


def gradient_norm(module: torch.nn.Module) -> Tensor:
    """Of the gradients that a module's parameters hold; those without one count as 0."""
    found = [p.grad.float() for p in module.parameters() if p.grad is not None]
    return torch.nn.utils.get_total_norm(found)


def need(module: str, why: str = "") -> Any:
    """An optional package. Raises Unable with the reason."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package built for another torch raises almost anything
        raise Unable(f"import {module}: {type(error).__name__}: {str(error)[:200]}{why}") from error


class StackStep:
    """The ``LayerStep`` of a stack of layers [batch, seq, hidden] → the same: forward and backward, its own dtype."""

    stack: torch.nn.Module
    run: Any
    """The stack, or what compiling made of it."""

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
        """See :class:`Step`."""
        self.stack.zero_grad(set_to_none=True)
        x = inputs.transpose(0, 1).contiguous().requires_grad_()
        out = self.run(x)
        out.backward(targets.transpose(0, 1))
        return out.transpose(0, 1), x.grad.transpose(0, 1)  # type: ignore[union-attr]

    def gradient_norm(self) -> Tensor:
        """See :class:`LayerStep`."""
        return gradient_norm(self.stack)
