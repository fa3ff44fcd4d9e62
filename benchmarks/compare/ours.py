"""This project: the native engine, as ``megatron-port train`` builds it; or its layers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.compare.peer import About, Unable
from benchmarks.compare.sizes import OPTIMIZER, Size
from benchmarks.compare.weights import Weights
from megatron_port.core.config.schema import BackendConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.record import record_of
from megatron_port.core.errors import PortError
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.linear import WgradAccumulator
from megatron_port.core.layers.providers import Providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.layers import TransformerLayer
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.ext.kernels.choose_products import choose_lt
from megatron_port.ext.kernels.quantised import QuantizedWeightCache
from megatron_port.ext.kernels.settings import FP8
from megatron_port.run.build import DTYPES, build_engine
from megatron_port.run.device import choose_device, keep_freed_memory


class Training:
    """Whole optimizer steps."""

    def __init__(
        self, size: Size, weights: Weights, ctx: ParallelContext, providers: Providers, about: About,
        graphs: str = "off",
    ) -> None:
        self.size, self.about = size, about
        config = size.run_config("none" if providers.fp8 is None else providers.fp8.recipe)
        config = replace(config, backend=replace(config.backend, graphs=graphs, device=ctx.device.type))
        self.engine = build_engine(config, ctx, providers, initialise=False)

        def read(
            name: str, kind: str, offset: tuple[int, ...], extent: tuple[int, ...], *, out: Tensor | None = None
        ) -> Tensor:
            if kind != "weight":
                return torch.zeros(extent)
            return weights.read(name)[tuple(slice(o, o + n) for o, n in zip(offset, extent))]

        self.engine.load_weights(read)
        self.steps = 0

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
        """See ``peer.Step``; the engine waits for the device once, at the end."""
        b = self.size.micro_batch
        batches = [
            MicroBatch(tuple(range(i, i + b)), tokens=inputs[i : i + b], labels=targets[i : i + b])
            for i in range(0, self.size.global_batch, b)
        ]
        result = self.engine.train_step(batches, step=self.steps, lr=OPTIMIZER.lr)
        self.steps += 1
        return result.loss, result.grad_norm


class Layers:
    """Forward and backward of a stack; weight gradients are added up in fp32 as in the engine."""

    def __init__(self, size: Size, weights: Weights, ctx: ParallelContext, providers: Providers, about: About) -> None:
        self.about = about
        run = size.run_config()
        build = BuildContext(
            model=size.model, layout=run.layout, ctx=ctx, providers=providers, dtype=DTYPES[size.dtype],
            step=StepSlot(DropoutStream(run.seed, ctx.device)),
        )
        build.stream.enabled = True
        layers = model_spec(size.model).layers
        self.stack = nn.Sequential(*(TransformerLayer(i, layer, build) for i, layer in enumerate(layers)))
        self.main_grads: dict[Tensor, Tensor] = {}
        self.gradients = WgradAccumulator(lambda weight: None, self.main_grads.__getitem__)
        self.copies = QuantizedWeightCache()
        self.others = []
        for p in self.stack.parameters():
            p.data.copy_(weights.read(record_of(p).name))
            if p.dim() > 1 and not record_of(p).name.endswith(".bias"):
                self.main_grads[p] = torch.zeros_like(p, dtype=torch.float32)
                p.wgrad_accumulator = self.gradients  # type: ignore[attr-defined]
                p.quantized_weight_cache = self.copies  # type: ignore[attr-defined]
            else:
                self.others.append(p)

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
        """See ``peer.Step``."""
        for p in self.others:
            p.grad = None
        x = inputs.detach().requires_grad_()
        with self.copies.active():
            out = self.stack(x)
            out.backward(targets)
        return out, x.grad

    def gradient_norm(self) -> Tensor:
        """See ``peer.LayerStep``; to be asked after the first step, since sums accumulate."""
        found = [self.main_grads.get(p, p.grad) for p in self.stack.parameters()]
        return torch.nn.utils.get_total_norm([g.float() for g in found if g is not None])


def build(
    size: Size, weights: Weights, device: torch.device, *, own_kernels: bool, fp8: str = "none", graphs: str = "off",
    products: str = "torch",
) -> Training | Layers:
    """See ``peer.build``."""
    graphs = "off" if size.layers_only and products == "lt" else graphs
    if graphs != "off" and (size.layers_only or device.type == "cpu"):
        raise Unable("only whole steps are captured, and on a GPU")
    found = [text for table in FP8 for text in table.problems(size.run_config(fp8))]
    if found:
        raise Unable(found[0])
    info = choose_device("cpu" if device.type == "cpu" else "auto")
    if not info.is_gpu:
        keep_freed_memory()
    backend = BackendConfig(device=info.kind, own_kernels="on" if own_kernels else "off")
    m = size.model
    try:
        providers = choose_providers(
            backend, info, DTYPES[size.dtype], engine="native", heads=(m.num_attention_heads, m.kv_heads, m.head_size),
            fp8=fp8, moe=m.moe,
        )
        if products == "lt":
            run = size.run_config(fp8)
            chosen, row = choose_lt(replace(run, backend=replace(backend, products=products)), info, 0)
            providers = replace(providers, products=chosen, table=(*providers.table, row))
    except PortError as error:
        raise Unable(str(error)) from error
    table = {row.op: row.provider for row in providers.table}
    about = About({"engine": "native", **table})
    if fp8 != "none" and not info.is_gpu:
        about.handicap = "a CPU multiplies 8-bit values in fp32"
    ctx = ParallelContext.single(device)
    if size.layers_only:
        return Layers(size, weights, ctx, providers, about)
    return Training(size, weights, ctx, providers, about, graphs)
