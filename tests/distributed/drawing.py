"""Random combinations of everything that can interact: layout, schedule, engine, model, data, optimizer, memory.

``draw(seed)`` is a pure function, so that a failure is named by its seed.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
from dataclasses import dataclass
from typing import Any, Literal

from cases import make_config
from drawing_data import fed, scheduled
from drawing_options import headed, optioned
from drawing_rules import ruled

from megatron_port.core.config.features import FineTuningConfig, OffloadConfig
from megatron_port.core.config.schema import ActivationsConfig, BatchConfig, LayoutConfig, RunConfig
from megatron_port.core.dist.mesh import Topology
from megatron_port.ext.memory.sites import RECOMPUTED, REPLICATED, SITES, choice
from megatron_port.ext.weights.settings import targets_of

STEPS = 3
OPS = ("norm", "activation", "rotary", "dropout", "softmax", "cross_entropy")
WHERE: tuple[Literal["cpu", "nvme"], ...] = ("cpu", "nvme")
"""Where offloaded state lives."""


@dataclass(frozen=True)
class Draw:
    """One combination."""

    seed: int
    config: RunConfig
    topology: Topology

    @property
    def case(self) -> tuple[RunConfig, Topology, int, int]:
        """What ``run_cases`` takes."""
        return self.config, self.topology, STEPS, 1

    def describe(self) -> dict[str, object]:
        """For the results file."""
        c, t = self.config, self.topology
        keep = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "vocab_size", "seq_length",
                "position_embedding", "normalization", "activation", "add_bias", "tie_embeddings", "hidden_dropout",
                "attention_dropout", "ffn_hidden_size", "parallel_residual", "rope_scaling", "rotary_percent",
                "qk_norm", "qkv_bias", "embedding_multiplier", "residual_multiplier", "attention_scale",
                "logits_divisor", "sliding_window", "attention_chunk", "attention_pattern", "attention_gate",
                "attention_sinks",
                "attention_softcap", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim",
                "latent_norm_epsilon", "norm_placement", "norm_pattern", "norm_zero_centered", "shared_norm",
                "qk_norm_over", "mlp_bias",
                "norm_bias", "head_bias", "scale_embedding", "logits_softcap", "rope_pattern", "window_rope_theta",
                "mtp_layers", "mtp_weight")
        return {
            "seed": self.seed, "engine": c.engine, "dtype": c.precision.dtype, "rule": c.optimizer.name,
            "tp": t.tp, "pp": t.pp, "dp": t.dp, "cp": t.cp, "method": c.layout.cp_method, "order": c.layout.cp_order,
            "sequence_parallel": c.layout.sequence_parallel, "recompute": c.activations.policy,
            "recomputed": list(c.activations.layers),
            "head_chunk": c.activations.head_chunk,
            "schedule": c.layout.pipeline_schedule, "vp": c.layout.virtual_pipeline_size,
            "zero_stage": c.layout.zero_stage, "shard": c.layout.shard_size,
            "reshard": c.layout.reshard, "bucket": c.layout.reduce_bucket_size,
            "padding": c.layout.vocab_padding_multiple, "chunks": c.layout.tp_overlap_chunks,
            "split": list(c.layout.pipeline_split),
            "micro_batch": c.batch.micro_batch_size, "global_batch": c.batch.global_batch_size,
            "rampup": c.batch.rampup_start, "mask_loss": c.data.mask_eod_loss,
            "documents": c.data.attention_documents, "position_reset": c.data.position_reset,
            "own_kernels": c.backend.own_kernels, "offload": c.offload.optimizer, "fraction": c.offload.fraction,
            "weights": c.offload.weights, "buffers": c.offload.buffers, "adapters": c.fine_tuning.method,
            "ema": c.optimizer.ema_decay, "clip_value": c.optimizer.clip_value, "zscore": c.optimizer.clip_zscore,
            "ema_evaluate": c.optimizer.ema_evaluate, "groups": len(c.optimizer.groups), "mup": c.model.mup_base_size,
            "eps": c.optimizer.eps, "corpora": [prefix.rpartition("/")[2] for prefix in c.data.train],
            "weights_of_corpora": list(c.data.weights), "packing": c.data.packing, "order_of_samples": c.data.order,
            "data_split": list(c.data.split), "decay": c.optimizer.decay, "decay_steps": c.optimizer.decay_steps,
            "warmup": c.optimizer.warmup_steps, "min_lr": c.optimizer.min_lr, "wsd": c.optimizer.wsd_steps,
            "wsd_shape": c.optimizer.wsd_shape, "z_loss": c.training.z_loss,
            "rank": c.fine_tuning.rank, "targets": list(c.fine_tuning.targets),
            **{k: getattr(c.model, k) for k in keep},
        }


def _sizes(r: random.Random) -> tuple[Topology, dict[str, Any]]:
    """(tp, pp, dp) from 1 to 6 on 2 to 8 ranks, and a batch of at most 12 samples."""
    while True:
        tp, pp, dp = (r.choices(range(1, 7), (6, 6, 4, 3, 2, 2))[0] for _ in range(3))
        world = tp * pp * dp
        if 1 < world <= 8 and (world < 7 or r.random() < 0.5):
            break
    while True:
        micro, count = r.choice((1, 1, 2, 4)), r.choice((1, 2, 3, 4, 5, 6))
        unit = micro * dp
        if 4 <= unit * count <= 12:
            break
    batch: dict[str, Any] = {"micro_batch_size": micro, "global_batch_size": unit * count}
    if count > 1 and r.random() < 0.25:
        start = unit * r.randrange(1, count)
        batch |= {"rampup_start": start, "rampup_increment": unit * count - start,
                  "rampup_samples": r.choice((1, start + 1))}
    return Topology(tp, pp, dp), batch


def _model(r: random.Random, t: Topology) -> dict[str, Any]:
    if t.tp > 1 and r.random() < 0.35:  # ranks share key/value heads
        groups = r.choice([g for g in range(1, t.tp) if t.tp % g == 0])
        heads = t.tp * r.choice((1, 1, 2))
    else:
        groups = t.tp * r.choice((1, 1, 2))
        heads = groups * r.choice((1, 2, 3))
    head_dim = r.choice((4, 6, 8))
    hidden = r.choice((24, 32, 40))
    if r.random() < 0.3 and hidden % (2 * heads) == 0:
        head_dim = 0
    llama = r.random() < 0.4
    position = "rope" if llama or r.random() < 0.3 else "learned"
    model: dict[str, Any] = {
        "hidden_size": hidden, "num_attention_heads": heads, "num_query_groups": 0 if groups == heads else groups,
        "head_dim": head_dim,
        "ffn_hidden_size": 0 if not llama and 4 * hidden % t.tp == 0 and r.random() < 0.2 else t.tp * r.choice((9, 16)),
        "vocab_size": r.choice((7, 31, 53, 64, 97)), "seq_length": t.tp * r.choice((3, 4, 5)),
        "position_embedding": position, "normalization": "rmsnorm" if llama else "layernorm",
        "norm_epsilon": r.choice((1e-5, 1e-6)), "activation": "swiglu" if llama else r.choice(("gelu", "gelu_tanh")),
        "add_bias": r.random() < (0.2 if llama else 0.85), "tie_embeddings": r.random() < 0.5,
        "parallel_residual": r.random() < 0.25, "init_std": r.choice((0.02, 0.04)),
        "hidden_dropout": r.choice((0.0, 0.1, 0.3)), "attention_dropout": r.choice((0.0, 0.0, 0.1)),
    }
    if position == "rope":
        size = head_dim or hidden // heads
        model["rope_theta"] = r.choice((10000.0, 500.0))
        model["rotary_percent"] = 0.5 if size % 4 == 0 and r.random() < 0.3 else 1.0
        model["rope_scaling"] = r.choice(("none", "none", "linear", "llama3"))
        if model["rope_scaling"] != "none":
            model["rope_factor"] = r.choice((2.0, 8.0))
        if model["rope_scaling"] == "llama3":
            model |= {"rope_original_length": r.choice((4, 8)), "rope_low_freq_factor": r.choice((1.0, 2.0)),
                      "rope_high_freq_factor": r.choice((4.0, 6.0))}
    # Drawn apart: the numbers before it, and so all other fields of a seed, stay what they were.
    model["qk_norm"] = random.Random(repr(model)).random() < 0.3
    model |= _options(random.Random(f"options {model!r}"), model)
    model |= _mask(random.Random(f"mask {model!r}"), model["seq_length"])
    if model.get("rope_scaling") == "yarn":
        model["rope_truncate"] = random.Random(f"truncate {model!r}").random() < 0.5
    return model | _layer_options(random.Random(f"layers {model!r}"), model)


def _mask(r: random.Random, seq: int) -> dict[str, Any]:
    """What queries see and what happens to scores, in half of the models."""
    if r.random() < 0.5:
        return {}
    options: dict[str, Any] = {"attention_sinks": r.random() < 0.4, "attention_softcap": r.choice((0.0, 0.0, 0.5))}
    if r.random() < 0.6:
        options |= {"sliding_window": r.choice((1, 2, max(seq // 2, 1), seq)),
                    "attention_pattern": r.choice(((), ("window", "full"), ("full", "window")))}
    return options


def _layer_options(r: random.Random, model: dict[str, Any]) -> dict[str, Any]:
    """Where norms stand, single biases and the like, in a third of the models."""
    if r.random() < 2 / 3:
        return {}
    placement = r.choice(("pre", "post", "sandwich"))
    options: dict[str, Any] = {
        "norm_placement": placement, "norm_zero_centered": r.random() < 0.5, "scale_embedding": r.random() < 0.3,
        "shared_norm": model["parallel_residual"] and placement != "post" and r.random() < 0.7,
        "logits_softcap": r.choice((0.0, 2.0)),
        "head_bias": model.get("logits_divisor", 1.0) == 1.0 and r.random() < 0.5,
        "qk_norm_over": "projection" if model["qk_norm"] and r.random() < 0.7 else "head",
    }
    if not model["add_bias"]:
        options |= {"mlp_bias": r.random() < 0.5,
                    "norm_bias": model["normalization"] == "layernorm" and r.random() < 0.5}
    if model["position_embedding"] == "rope" and r.random() < 0.5:
        options["rope_pattern"] = r.choice((("rope", "none"), ("none", "rope")))[: r.choice((1, 2))]
        if model.get("sliding_window"):
            options["window_rope_theta"] = r.choice((0.0, 50.0))
    if model["activation"] == "swiglu" and r.random() < 0.5:
        options["activation"] = "geglu_tanh"
    return options


def _options(r: random.Random, model: dict[str, Any]) -> dict[str, Any]:
    """Options of other families, in a third of the models."""
    if r.random() < 2 / 3:
        return {}
    rope = model["position_embedding"] == "rope"
    options: dict[str, Any] = {
        "qkv_bias": not model["add_bias"] and r.random() < 0.5, "embedding_multiplier": r.choice((1.0, 3.0)),
        "residual_multiplier": r.choice((1.0, 0.3)), "attention_scale": r.choice((0.0, 0.5)) if rope else 0.0,
        "logits_divisor": r.choice((1.0, 1.5)),
    }
    if rope and model["rope_scaling"] == "none" and r.random() < 0.5:
        options |= {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": r.choice((4, 16)),
                    "rope_beta_fast": r.choice((32.0, 2.0)), "rope_beta_slow": r.choice((1.0, 0.5)),
                    "rope_attention_factor": r.choice((0.0, 1.2))}
    return options


def _latent(r: random.Random, model: dict[str, Any]) -> dict[str, Any]:
    """The model with latent attention, and without what that excludes; one in eight."""
    if r.random() >= 1 / 8:
        return model
    head = r.choice((4, 6, 8))
    return model | {
        "normalization": "rmsnorm", "position_embedding": "rope", "add_bias": False, "qkv_bias": False,
        "qk_norm": False, "num_query_groups": 0, "rotary_percent": 1.0, "head_dim": head,
        "kv_lora_rank": r.choice((6, 16)), "q_lora_rank": r.choice((0, 10)), "qk_rope_head_dim": r.choice((2, 4)),
        "v_head_dim": r.choice((0, 3, head)), "qk_norm_over": "head", "norm_bias": False,
        "latent_norm_epsilon": 1e-3 if head == 6 else 0.0,
    }


def _chunked(r: random.Random, config: RunConfig) -> RunConfig:
    """The run with attention within chunks in some layers, one in six."""
    model = config.model
    if config.precision.dtype not in ("fp32", "fp64") or r.random() >= 1 / 6:
        return config
    kinds = ("chunk", "full", *(("window",) if model.sliding_window else ()))
    pattern = ("chunk", *r.choices(kinds, k=min(r.randint(0, 1), model.num_layers - 1)))
    window = model.sliding_window if "window" in pattern else 0
    return dataclasses.replace(config, model=dataclasses.replace(
        model, attention_chunk=r.choice((1, 3, 4, 8, model.seq_length)), attention_pattern=pattern,
        sliding_window=window, window_rope_theta=model.window_rope_theta if window else 0.0,
    ))


def _layout(r: random.Random, t: Topology, engine: str) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "tensor_parallel_size": t.tp, "pipeline_parallel_size": t.pp, "data_parallel_size": t.dp,
        "sequence_parallel": r.random() < 0.5, "recompute": r.choice(("none", "selective", "full")),
        "vocab_padding_multiple": r.choice((1, 1, 8)),
    }
    if engine == "native":
        schedule, chunks = r.choice((("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("zb-h1", 1), ("zb-v", 2)))
        zero = r.choice((0, 1, 1) if schedule.startswith("zb-") else (0, 1, 2, 2))
        layout |= {"pipeline_schedule": schedule, "virtual_pipeline_size": chunks, "zero_stage": zero,
                   "reduce_bucket_size": r.choice((500, 4000, 1 << 25))}
    return layout


def _backend(r: random.Random, engine: str, dtype: str, model: dict[str, Any], own: str) -> dict[str, Any]:
    """Providers that are not those of ``own_kernels``: torch's for single ops."""
    backend: dict[str, Any] = {op: "torch" for op in OPS if own == "on" and r.random() < 0.15}
    # In half precision one process has the layout's providers, and its emulation those that cut nothing themselves.
    if dtype in ("fp32", "fp64") and not model["attention_dropout"] and r.random() < 0.25:
        served = not model.get("attention_sinks") and not model.get("attention_softcap")
        backend["attention"] = "sdpa" if served else "auto"
    if engine == "native" and r.random() < 0.25:
        backend["optimizer"] = "torch"
    return backend


def draw(seed: int) -> Draw:
    """A legal combination; every run with the same seed gives the same."""
    r = random.Random(f"combination-{seed}")
    t, batch = _sizes(r)
    engine = r.choice(("native", "native", "deepspeed"))
    dtype = r.choice(("fp64", "fp32", "bf16", "fp16") if engine == "native" else ("fp32", "bf16", "bf16"))
    model, layout = _model(r, t), _layout(r, t, engine)
    stages = t.pp * layout.get("virtual_pipeline_size", 1)
    if dtype in ("bf16", "fp16") and model.get("sliding_window") == 1:
        model["sliding_window"] = 2  # of one key, queries and keys have no gradient that rounding could be near to
    if dtype in ("fp32", "fp64"):  # nothing emulates how latents that all heads share are rounded
        model = _latent(random.Random(f"latent-{seed}"), model)
    model["num_layers"] = stages + r.choice((0, 1, 1, 2))
    if model["num_layers"] < len(model.get("attention_pattern", ())):
        del model["attention_pattern"]
    if stages > 1 and r.random() < 0.25:
        cuts = sorted(r.sample(range(1, model["num_layers"]), stages - 1))
        layout["pipeline_split"] = tuple(b - a for a, b in zip([0, *cuts], [*cuts, model["num_layers"]]))
    own = r.choice(("on", "off"))
    config = make_config(
        engine=engine, dtype=dtype, model=model, layout=layout, own_kernels=own,
        clip_grad=r.choice((0.0, 0.1, 0.5)), mask_loss=r.random() < 0.3,
    )
    change = dataclasses.replace
    config = change(
        config, seed=r.randrange(1000), batch=BatchConfig(**batch),
        backend=change(config.backend, **_backend(r, engine, dtype, model, config.backend.own_kernels)),
        optimizer=change(config.optimizer, beta1=r.choice((0.9, 0.8)), beta2=r.choice((0.95, 0.99)),
                         weight_decay=r.choice((0.1, 0.0))),
    )
    if dtype == "fp16":
        config = change(config, precision=change(
            config.precision, initial_loss_scale=r.choice((128.0, 1024.0)), loss_scale_window=r.choice((1, 1000)),
            loss_scale_hysteresis=r.choice((1, 2)), min_loss_scale=r.choice((1.0, 64.0)),
        ))
    # Drawn apart, so that the other choices of a seed stay what they were.
    shards = [n for n in range(2, t.dp) if t.dp % n == 0]
    if engine == "native" and config.layout.zero_stage and shards:
        shard = random.Random(f"shard-{seed}").choice([0, *shards])
        config = change(config, layout=change(config.layout, shard_size=shard))
    sharded, before = random.Random(f"zero-3-{seed}"), config.layout
    if engine == "native" and before.zero_stage == before_stage_3(before) and sharded.random() < 0.5:
        config = change(config, layout=change(before, zero_stage=3, reshard=sharded.choice(("forward", "step"))))
    whole = config.model.seq_length // (t.tp if config.layout.sequence_parallel else 1)
    chunks = random.Random(f"chunks-{seed}").choice([n for n in range(1, whole + 1) if whole % n == 0])
    # A product of few rows may sum in another order, which the process that emulates half precision does not follow.
    if t.tp > 1 and seed % 2 and dtype in ("fp32", "fp64"):
        config = change(config, layout=change(config.layout, tp_overlap_chunks=chunks))
    config = change(config, checkpoint=change(config.checkpoint, asynchronous=False))  # as state on a disk wants it
    if seed % 19 in (12, 14, 17) and engine == "native" and dtype in ("fp32", "fp64"):
        config = _adapted(random.Random(f"adapters-{seed}"), config)
    config, t = _divided(random.Random(f"context-{seed}"), config, t)
    config = headed(random.Random(f"head-{seed}"), _planned(random.Random(f"activations-{seed}"), config))
    config = _documents(random.Random(f"documents-{seed}"), config)
    config = _further(random.Random(f"further-{seed}"), config)
    if not config.model.kv_lora_rank and random.Random(f"gate-{seed}").random() < 1 / 6:
        config = change(config, model=change(config.model, attention_gate=True))
    placed = random.Random(f"norms-{seed}")
    if dtype in ("fp32", "fp64") and not config.model.shared_norm and placed.random() < 1 / 6:
        kinds = tuple(placed.choices(("pre", "post", "sandwich"), k=placed.randint(2, 3)))
        config = change(config, model=change(config.model, norm_placement="pre", norm_pattern=kinds))
    config = _chunked(random.Random(f"chunk-{seed}"), config)
    config = _offloaded(random.Random(f"offload-{seed}"), config)
    config = ruled(random.Random(f"rule-{seed}"), config)
    config = optioned(random.Random(f"optimizer-{seed}"), config)
    config = fed(random.Random(f"corpora-{seed}"), config)
    return Draw(seed, scheduled(random.Random(f"schedule-{seed}"), config, STEPS), t)


def _adapted(r: random.Random, config: RunConfig) -> RunConfig:
    """The run with adapters; no seed of the tests, whose gradients of all weights would be missing."""
    method = r.choice(("lora", "dora"))
    targets = targets_of(config.model)
    tuning = FineTuningConfig(
        method=method, rank=r.choice((1, 3, 8)), alpha=r.choice((4.0, 16.0)), rslora=r.random() < 0.3,  # type: ignore[arg-type]
        dropout=r.choice((0.0, 0.2)) if method == "lora" else 0.0,
        targets=tuple(r.sample(targets, r.randrange(1, 5))) if r.random() < 0.5 else (),
    )
    return dataclasses.replace(config, fine_tuning=tuning)


def _divided(r: random.Random, config: RunConfig, t: Topology) -> tuple[RunConfig, Topology]:
    """The run with sequences divided over ranks that were replicas, half of those that can; sequences that can be
    divided in every order."""
    sizes = [cp for cp in (2, 4) if t.dp % cp == 0]
    if config.engine != "native" or not sizes or r.random() < 0.5:
        return config, t
    cp, layout, model = r.choice(sizes), config.layout, config.model
    dp, held = t.dp // cp, model.kv_heads_held(t.tp) // t.tp
    method: Any = r.choice(("gather", "ring", "heads" if held % cp == 0 else "gather"))
    order: Any = r.choice(("contiguous", "zigzag", "balanced"))
    layout = dataclasses.replace(
        layout, data_parallel_size=dp, context_parallel_size=cp, cp_method=method, cp_order=order,
        shard_size=layout.shard_size if layout.shard_size and dp % layout.shard_size == 0 else 0,
    )
    model = dataclasses.replace(model, seq_length=2 * cp * model.seq_length)
    config = dataclasses.replace(config, layout=layout, model=model)
    return served(config), dataclasses.replace(t, dp=dp, cp=cp)


def served(config: RunConfig) -> RunConfig:
    """The run with math in a ring where the attention asked for gives no partial results: torch's, or own with
    dropout."""
    asked, drops = config.backend.attention, config.model.attention_dropout > 0
    if config.layout.cp_method != "ring" or not (asked == "sdpa" or (asked == "own" and drops)):
        return config
    return dataclasses.replace(config, backend=dataclasses.replace(config.backend, attention="math"))


def _further(r: random.Random, config: RunConfig) -> RunConfig:
    """The run with prediction of further tokens, one in three of those that can."""
    model = config.model
    drawn = config.engine == "native" and model.position_embedding == "rope" and r.random() < 1 / 3
    if not drawn or config.fine_tuning.enabled:
        return config
    depths = min(r.choice((1, 1, 2, 3)), model.seq_length - 1)
    return dataclasses.replace(
        config, model=dataclasses.replace(model, mtp_layers=depths, mtp_weight=r.choice((0.3, 1.0)))
    )


def _documents(r: random.Random, config: RunConfig) -> RunConfig:
    """The run with samples of several documents, one in three; of these, half of those that can count positions from
    each document's start."""
    if r.random() < 2 / 3:
        return config
    reset = config.model.position_embedding == "learned" and r.random() < 0.5
    data = dataclasses.replace(config.data, attention_documents="within", position_reset=reset)
    return dataclasses.replace(config, data=data)


def _planned(r: random.Random, config: RunConfig) -> RunConfig:
    """The run with single activations recomputed, other ones in each layer, and in half of those that can some of the
    others swapped or partitioned; two in five."""
    if r.random() >= 0.4:
        return config
    layers = ["+".join(s for s in RECOMPUTED if r.random() < 0.5) for _ in range(config.model.num_layers)]
    if config.engine == "native" and r.random() < 0.5:
        for number, sites in enumerate(layers):
            others = [site for site in SITES if site not in sites.split("+")]
            moved = [choice(s, "partition" if s in REPLICATED and r.random() < 0.5 else "swap") for s in others]
            layers[number] = "+".join(filter(None, [sites, *(m for m in moved if r.random() < 0.5)]))
    return dataclasses.replace(config, activations=ActivationsConfig(policy="plan", layers=tuple(layers)))


def _offloaded(r: random.Random, config: RunConfig) -> RunConfig:
    """The run with its state on the host or a disk, which takes the own optimizer kernel; half of those that can."""
    layout, dtype = config.layout, config.precision.dtype
    drawn = config.engine == "native" and layout.zero_stage > 0 and dtype != "fp64" and r.random() < 0.5
    if not drawn or config.backend.optimizer != "auto":
        return config
    change, host = dataclasses.replace, layout.zero_stage == 3 and r.random() < 0.5
    offload = OffloadConfig(
        optimizer=r.choice(WHERE), weights="cpu" if host else "none", buffers=r.choice((1, 2, 4)),
        fraction=1.0 if host else r.choice((0.3, 1.0)), nvme_path=tempfile.gettempdir(),
    )
    if offload.optimizer == "cpu":
        offload = change(offload, nvme_path="")
    backend = change(config.backend, optimizer="own")
    if backend.own_kernels == "off":  # the optimizer's alone
        backend = change(backend, own_kernels="auto", **dict.fromkeys(OPS, "torch"))
    return change(config, offload=offload, backend=backend)


def before_stage_3(layout: LayoutConfig) -> int:
    """The ZeRO stage that a seed had before stage 3 took some of its place."""
    return 1 if layout.pipeline_schedule.startswith("zb-") else 2
