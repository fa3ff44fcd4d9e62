"""nanotron's Llama, divided by its own tp, pipeline engines and DDP, with its loss, clipping and optimizers.

Its kernels are flash-attn's and Triton's; ``foreign.absent`` has torch's own for attention, rotary positions and norms,
and stand-ins for what is imported alone. ``foreign.shims``: ``cuda_on_cpu`` and ``no_compiler`` always, ``fp64_stays``
with fp64. The reference takes the same micro-batches, as nanotron's loss is a mean of theirs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron_port.core.errors import ConfigError
from megatron_port.tools.foreign import shims
from megatron_port.tools.foreign.absent import absent, flash_attention
from megatron_port.tools.foreign.adapter import Adapter, Batch, Placement, World
from megatron_port.tools.foreign.placement import whole

COMMIT = "2411b02"
ABSENT = ("triton", "grouped_gemm", "datasets", "torchtyping", "dacite", "datatrove", "lighteval", "wandb", "numba")

flash_attention()
try:
    with shims.no_compiler(), absent(*ABSENT):
        from nanotron import distributed as dist
        from nanotron.config import config as configs
        from nanotron.config.models_config import LlamaConfig
        from nanotron.config.parallelism_config import ParallelismArgs
        from nanotron.helpers import init_optimizer_and_grad_accumulator
        from nanotron.models import build_model, llama
        from nanotron.optim.clip_grads import clip_grad_norm
        from nanotron.parallel import ParallelContext
        from nanotron.parallel.pipeline_parallel.tensor_pointer import TensorPointer
        from nanotron.parallel.tied_parameters import sync_tied_weights_gradients
        from nanotron.scaling.parametrization import ParametrizationMethod
        from nanotron.trainer import mark_tied_parameters
except ImportError as error:
    raise ConfigError(
        f"adapter nanotron needs nanotron at commit {COMMIT}, which cannot be imported here ({error}); run: "
        f"pip install --no-deps git+https://github.com/huggingface/nanotron@{COMMIT}"
    ) from error

WIDTH, HEADS, FEATURES = 32, 4, 48


class State(NamedTuple):
    """A rank's part of the trainer."""

    model: nn.Module
    optimizer: Any
    context: Any
    """ParallelContext."""
    plan: Any
    """ParallelismArgs."""
    clip: float
    """Largest norm."""


class Nanotron(Adapter):
    """Axes as nanotron orders them: pp, dp, tp."""

    layout: ClassVar[Mapping[str, Any]] = {
        "tp": 1, "pp": 1, "mode": "all_reduce", "engine": "1f1b", "zero": 0, "recompute": False, "again": True,
        "overlap": False,
    }
    """``mode``: reduce_scatter is sequence parallelism. ``again``: it gathers inputs again in the backward pass.
    ``overlap``: of tp's messages with products."""
    model: ClassVar[Mapping[str, Any]] = {
        "fp64": True, "layers": 2, "groups": 4, "tied": False, "micro_batch": 2, "z_loss": False, "clip": True,
        "interleaved": False,
    }
    space: ClassVar[Mapping[str, Any]] = {
        "tp": (1, 2, 4), "pp": (1, 2), "mode": ("all_reduce", "reduce_scatter"), "engine": ("1f1b", "afab"),
        "zero": (0, 1), "recompute": (False, True), "again": (True, False), "overlap": (False, True),
        "fp64": (True, False), "layers": (2, 4), "groups": (4, 2), "tied": (False, True), "micro_batch": (1, 2),
        "z_loss": (False, True), "clip": (True, False), "interleaved": (False, True),
    }
    ignored = -100

    def legal(self, options: Mapping[str, Any], size: int) -> str:
        o = options
        dense = o["tp"] * o["pp"]
        for wrong, why in (
            (size % dense, f"tp x pp = {dense} does not divide them"),
            (o["groups"] % o["tp"], "tp does not divide the groups"),
            (o["tp"] == 1 and (o["mode"] != "all_reduce" or not o["again"]), "an option of tp without tp"),
            (o["overlap"] and o["mode"] == "all_reduce", "messages overlap in mode reduce_scatter alone"),
            (o["zero"] and size == dense, "zero needs replicas"),
        ):
            if wrong:
                return why
        rest = self.samples % (size // dense * o["micro_batch"])
        return "replicas x micro_batch do not divide the samples" if rest else ""

    def axes(self, world: World) -> Mapping[str, int]:
        tp, pp = world["tp"], world["pp"]
        return {"pp": pp, "dp": world.size // (tp * pp), "tp": tp}

    def start(self, world: World) -> None:
        shims.cuda_on_cpu()
        if world["fp64"]:
            shims.fp64_stays()
            llama.masked_mean = lambda loss, mask, dtype: (loss * mask).sum() / mask.sum()  # theirs is compiled
        shims.gloo_flat()
        shims.hold_in_recompute(torch.utils.checkpoint.CheckpointFunction)
        torch.cuda.set_device = lambda *_: None
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # which its tp asserts
        super().start(world)

    def build(self, world: World) -> State:
        axes = self.axes(world)
        context = ParallelContext(axes["tp"], axes["pp"], axes["dp"])
        plan = ParallelismArgs(
            dp=axes["dp"], pp=axes["pp"], tp=axes["tp"], pp_engine=world["engine"], tp_mode=world["mode"],
            tp_linear_async_communication=world["overlap"], recompute_layer=world["recompute"],
            tp_recompute_allgather=world["again"],
        )
        config = LlamaConfig(
            hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=world["groups"], rms_norm_eps=1e-5,
            intermediate_size=FEATURES, num_hidden_layers=world["layers"], vocab_size=self.vocabulary,
            max_position_embeddings=2 * self.sequence, tie_word_embeddings=world["tied"],
            rope_interleaved=world["interleaved"], z_loss_enabled=world["z_loss"], z_loss_coefficient=0.01,
        )
        dtype = torch.float64 if world["fp64"] else torch.float32
        made = build_model(lambda: llama.LlamaForTraining(config, context, plan), context, dtype, device="cpu")
        made.model.p2p.device = torch.device("cpu")  # it makes buffers in the backward pass, where no shim is on
        mark_tied_parameters(made, context, plan)
        model = made
        if axes["dp"] > 1:
            model = DistributedDataParallel(made, process_group=context.dp_cp_pg, broadcast_buffers=False)
        settings = configs.OptimizerArgs(
            optimizer_factory=configs.AdamWOptimizerArgs(
                adam_eps=1e-5, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=False
            ),
            zero_stage=world["zero"], weight_decay=0.1, clip_grad=1.0, accumulate_grad_in_fp32=False,
            learning_rate_scheduler=configs.LRSchedulerArgs(
                learning_rate=1e-3, lr_warmup_style="constant", lr_decay_style="linear", min_decay_lr=1e-3
            ),
        )
        optimizer, _ = init_optimizer_and_grad_accumulator(ParametrizationMethod.STANDARD, model, settings, context)
        return State(model, optimizer, context, plan, 0.5 if world["clip"] else 1e9)

    def step(self, state: State, batch: Batch, world: World) -> float | None:
        model, context = state.model, state.context
        made = _unwrapped(model)
        state.optimizer.zero_grad()
        mine = batch.share(dist.get_rank(context.dp_pg), context.dp_pg.size())
        micro = min(world["micro_batch"], len(mine))
        count = len(mine) // micro
        outputs = state.plan.pp_engine.train_batch_iter(
            model=model, pg=context.pp_pg, batch=_inputs(mine, micro, made, context), nb_microbatches=count,
            grad_accumulator=None,
        )
        sync_tied_weights_gradients(module=made, parallel_context=context, grad_accumulator=None)
        if not isinstance(outputs[0]["loss"], Tensor):
            return None
        loss = torch.stack([output["loss"] for output in outputs]).sum()
        dist.all_reduce(loss, group=context.dp_cp_pg)
        return float(loss) / float(context.dp_cp_pg.size())

    def update(self, state: State) -> None:
        state.optimizer.step()

    def norm(self, state: State) -> float:
        """Clip, once gradients are read; return the norm before."""
        named = [(n, p) for n, p in _unwrapped(state.model).get_named_params_with_correct_tied() if p.requires_grad]
        return float(clip_grad_norm(state.context.mp_pg, named, state.clip, None))

    def placements(self, state: State, world: World) -> Mapping[str, Placement]:
        """State the slices that nanotron keeps with each parameter."""
        found: dict[str, Placement] = {}
        for name, parameter in self.parameters(state).items():
            known: Any = parameter
            if not known.is_sharded:
                continue
            info = known.get_sharded_info()
            full, index = whole(info.unsharded_shape), torch.full(parameter.shape, -1)
            for pair in info.local_global_slices_pairs:
                index[pair.local_slices] = full[pair.global_slices]
            found[name] = index
        return found


def _unwrapped(model: Any) -> Any:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _inputs(mine: Batch, micro: int, model: Any, context: Any) -> Iterator[Mapping[str, Any]]:
    """Yield micro-batches as nanotron's collator makes them: tensors where a stage takes them, pointers elsewhere."""
    rank = dist.get_rank(context.pp_pg)
    for at in range(0, len(mine), micro):
        part = mine[at : at + micro]
        given = {"input_ids": part.tokens, "input_mask": torch.ones_like(part.tokens, dtype=torch.bool)}
        wanted = {"label_ids": part.labels.clamp(min=0), "label_mask": part.labels >= 0}
        first, last = model.input_pp_rank, model.output_pp_rank
        yield {
            **{name: value if rank == first else TensorPointer(group_rank=first) for name, value in given.items()},
            **{name: value if rank == last else TensorPointer(group_rank=last) for name, value in wanted.items()},
        }

