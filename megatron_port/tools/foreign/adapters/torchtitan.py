"""torchtitan's Llama 3, divided by its own ``parallelize_llama`` and ``pipeline_llm``, with its loss and clipping.

The reference is the model as it is built, not divided. A step is what its ``Trainer.train_step`` does: the loss is a
sum over this rank's labels, divided by the labels of all ranks, and FSDP sums gradients. Attention is torch's own, as
torchtitan's others compile kernels. ``foreign.shims``: ``titan_on_cpu`` always, ``fp64_stays`` with fp64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_port.core.errors import ConfigError
from megatron_port.tools.foreign import shims
from megatron_port.tools.foreign.adapter import Adapter, Batch, World

try:
    from torchtitan.components import loss as losses
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, full_dtensor, spmd_types, utils
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
    from torchtitan.models.llama3.parallelize import parallelize_llama
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config
except ImportError as error:
    raise ConfigError(
        f"adapter torchtitan needs torchtitan 0.3.0, which cannot be imported here ({error}); run: "
        "pip install torchtitan==0.3.0 triton"
    ) from error

WIDTH, HEADS, FEATURES = 32, 4, 48


class State(NamedTuple):
    """A rank's part of the trainer."""

    parts: list[Any]
    """Models of this rank's stages."""
    schedule: Any
    """Schedule of the pipeline, or None."""
    loss: Any
    dims: Any
    """ParallelDims; None in the reference."""
    optimizer: torch.optim.Optimizer


class TorchTitan(Adapter):
    """Axes as torchtitan orders them: pp, replicas, FSDP's shards, tp."""

    layout: ClassVar[Mapping[str, Any]] = {
        "replicas": 1, "tp": 1, "sp": False, "pp": 1, "backend": "partial_dtensor", "accumulate": 1,
        "reshard": "default", "recompute": False, "chunks": 1, "schedule": "1F1B",
    }
    """``backend``: its way to divide a model; spmd_types, a third one, needs a nightly torch, whose FSDP knows it.
    ``chunks``: parts of the sequence, whose logits are computed one after the other. ``accumulate``: passes of a step;
    under pp, micro-batches have one sample."""
    model: ClassVar[Mapping[str, Any]] = {
        "fp64": True, "layers": 2, "groups": 2, "fused_qkv": True, "tied": False, "unused": 0,
    }
    """``unused``: words of the vocabulary that no sample has, so that tp need not divide it."""
    space: ClassVar[Mapping[str, Any]] = {
        "replicas": (1, 2), "tp": (1, 2, 4), "sp": (False, True), "pp": (1, 2), "accumulate": (1, 2),
        "backend": ("partial_dtensor", "full_dtensor"), "reshard": ("default", "always", "never"),
        "recompute": (False, True), "chunks": (1, 2), "schedule": ("1F1B", "Interleaved1F1B"),
        "fp64": (True, False), "layers": (2, 4), "groups": (2, 4), "fused_qkv": (True, False), "tied": (False, True),
    }
    ignored = losses.IGNORE_INDEX

    def legal(self, options: Mapping[str, Any], size: int) -> str:
        o = options
        dense = o["replicas"] * o["tp"] * o["pp"]
        for wrong, why in (
            (size % dense, f"replicas x tp x pp = {dense} does not divide them"),
            (o["sp"] and o["tp"] == 1, "sp needs tp"),
            (o["groups"] % o["tp"], "tp does not divide the groups"),
            (o["schedule"] != "1F1B" and o["pp"] == 1, "a schedule needs pp"),
            (o["layers"] < o["pp"], "there are fewer layers than stages"),
            (o["tied"] and o["pp"] > 1, "torchtitan refuses tied embeddings with pp"),
            (o["recompute"] and o["fp64"], "recompute leaves the mode that keeps fp64; set fp64=false"),
            (self.sequence % o["chunks"], "chunks do not divide the sequence"),
        ):
            if wrong:
                return why
        parts = size // (o["tp"] * o["pp"]) * o["accumulate"]
        if self.samples % parts:
            return "dp x accumulate does not divide the samples"
        return "there are fewer micro-batches than stages" if self.samples // parts < o["pp"] else ""

    def axes(self, world: World) -> Mapping[str, int]:
        tp, pp, replicas = world["tp"], world["pp"], world["replicas"]
        return {"pp": pp, "replicas": replicas, "shard": world.size // (tp * pp * replicas), "tp": tp}

    def start(self, world: World) -> None:
        shims.titan_on_cpu()
        if world["fp64"]:
            shims.fp64_stays()
        super().start(world)
        utils.set_spmd_backend(world["backend"])

    def build(self, world: World) -> State:
        self.world = world
        dtype = torch.float64 if world["fp64"] else torch.float32
        vocabulary = self.vocabulary + world["unused"]
        config = _config(world, vocabulary, self.sequence)
        set_llama3_sharding_config(config, enable_sp=world["sp"])
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                whole = config.build()
            loss = _loss(world, vocabulary)
            parts, schedule, dims = self._divided(whole, config, loss, world, str(dtype).removeprefix("torch."))
            for part in parts:
                for module in part.modules():
                    if isinstance(module, FSDPModule):  # gloo has no scaled sums; the scale is 1
                        module.set_force_sum_reduction_for_comms(True)
                part.to_empty(device="cpu")
                with torch.no_grad():
                    part.init_weights(buffer_device=None)
        finally:
            torch.set_default_dtype(before)
        if world["chunks"] > 1 and parts[-1].lm_head is not None:
            loss.set_lm_head(parts[-1].lm_head)
            parts[-1]._skip_lm_head = True
        weights = [parameter for part in parts for parameter in part.parameters()]
        return State(parts, schedule, loss, dims, torch.optim.AdamW(weights, lr=1e-3, eps=1e-5))

    def _divided(
        self, whole: Any, config: Any, loss: Any, world: World, dtype: str
    ) -> tuple[list[Any], Any, ParallelDims | None]:
        """Return the models of this rank's stages, the schedule and the meshes."""
        if world.size == 1:
            return [whole], None, None
        parallelism = ParallelismConfig(
            data_parallel_replicate_degree=world["replicas"], tensor_parallel_degree=world["tp"],
            enable_sequence_parallel=world["sp"], pipeline_parallel_degree=world["pp"],
            pipeline_parallel_schedule=world["schedule"], fsdp_reshard_after_forward=world["reshard"],
            spmd_backend=world["backend"],
        )
        dims = ParallelDims.from_config(parallelism, world.size)
        dims.build_mesh()
        local = self.samples // (dims.dp_replicate * dims.dp_shard * world["accumulate"])
        settings = {
            "parallel_dims": dims, "parallelism": parallelism, "compile_config": CompileConfig(enable=False),
            "training": TrainingConfig(seq_len=self.sequence, local_batch_size=local, mixed_precision_param=dtype,
                                       mixed_precision_reduce=dtype),
            "ac_config": FullAC.Config() if world["recompute"] else None, "dump_folder": "",
        }
        if world["pp"] == 1:
            return [parallelize_llama(whole, **settings)], None, dims
        schedule, parts, *_ = pipeline_llm(
            whole, device=torch.device("cpu"), model_config=config, parallelize_fn=parallelize_llama, loss_fn=loss,
            **settings,
        )
        return parts, schedule, dims

    def loaded(self, state: State) -> None:
        """Run a pass by which the pipeline finds the shapes of its messages: its outputs are none of the step's."""
        if state.schedule is not None:
            nothing = torch.zeros(self.samples, self.sequence, dtype=torch.int64)
            self.step(state, Batch(nothing, nothing), self.world)

    def step(self, state: State, batch: Batch, world: World) -> float | None:
        state.optimizer.zero_grad()
        dims, index, count = state.dims, 0, 1
        if dims is not None and dims.dp_enabled:
            index, count = dims.get_mesh("batch").get_local_rank(), dims.get_mesh("batch").size()
        mine = batch.share(index, count)
        labels = (mine.labels != self.ignored).sum()
        if count > 1:
            labels = utils.dist_sum_tensor(labels, dims.get_mesh("batch"))
        total: Any = None
        for part in range(world["accumulate"]):
            loss = self._pass(state, mine.share(part, world["accumulate"]), labels, world["backend"])
            if loss is not None:
                total = loss.detach() if total is None else total + loss.detach()
        if total is None:
            return None
        return float(utils.dist_sum(total, None if dims is None else dims.get_optional_mesh("loss")))

    def _pass(self, state: State, micro: Batch, count: Tensor, backend: str) -> Tensor | None:
        """Run forward and backward pass as its trainer does; return the loss."""
        at = torch.arange(micro.tokens.shape[1]).expand_as(micro.tokens).contiguous()
        inputs, labels, more = micro.tokens, micro.labels, {"positions": at}
        if state.dims is None:
            context: Any = nullcontext
        else:
            context = utils.get_spmd_context(parallel_dims=state.dims)
            typed = {"full_dtensor": full_dtensor.parallelize_inputs,
                     "spmd_types": spmd_types.annotate_input_spmd_types}
            if backend in typed:
                inputs, labels, more = typed[backend](state.dims, inputs, labels, more)
        with context():
            if state.schedule is None:
                loss: Tensor = state.loss(state.parts[0](inputs, **more), labels, count)[0]
                loss.backward()
                return loss
            found: list[Tensor] | None = [] if state.parts[-1].lm_head is not None else None
            first = (inputs,) if state.parts[0].tok_embeddings is not None else ()
            state.schedule.step(*first, target=None if found is None else labels, losses=found,
                                loss_kwargs={"global_valid_tokens": count}, return_outputs=False, **more)
        return None if found is None else torch.stack(found).sum()

    def norm(self, state: State) -> float:
        weights = [parameter for part in state.parts for parameter in part.parameters()]
        stages = None if state.dims is None else state.dims.get_optional_mesh("pp")
        return float(utils.clip_grad_norm_(weights, 1.0, foreach=True, pp_mesh=stages))

    def update(self, state: State) -> None:
        state.optimizer.step()

    def modules(self, state: State) -> Iterable[tuple[str, nn.Module]]:
        for part in state.parts:
            yield "", part


def _loss(world: World, vocabulary: int) -> Any:
    """Return its loss, whose logits may be computed in chunks of the sequence."""
    plain = losses.CrossEntropyLoss.Config(global_vocab_size=vocabulary)
    if world["chunks"] == 1:
        return plain.build(compile_config=CompileConfig(enable=False))
    wrapped = losses.ChunkedLossWrapper.Config(num_chunks=world["chunks"], loss_fn=plain)
    return wrapped.build(compile_config=CompileConfig(enable=False))


def _config(world: World, vocabulary: int, sequence: int) -> Any:
    """Return the configuration of a small Llama 3."""
    ones, small = {"weight": nn.init.ones_}, {"weight": partial(nn.init.normal_, std=0.1)}
    rope = ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=sequence, theta=500000)
    norm = partial(RMSNorm.Config, normalized_shape=WIDTH, param_init=ones)
    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=norm(), ffn_norm=norm(),
            attention=make_gqa_config(
                dim=WIDTH, n_heads=HEADS, n_kv_heads=world["groups"], wqkv_param_init=small, wo_param_init=small,
                inner_attention=ScaledDotProductAttention.Config(), fuse_qkv=world["fused_qkv"], rope=rope,
            ),
            feed_forward=make_ffn_config(dim=WIDTH, hidden_dim=FEATURES, w1_param_init=small, w2w3_param_init=small),
        )
        for _ in range(world["layers"])
    ]
    return Llama3Model.Config(
        dim=WIDTH, vocab_size=vocabulary, norm=norm(), layers=layers, enable_weight_tying=world["tied"],
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=WIDTH, param_init=small),
        lm_head=Linear.Config(in_features=WIDTH, out_features=vocabulary, param_init=small),
    )
