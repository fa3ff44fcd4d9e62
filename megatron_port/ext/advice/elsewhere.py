"""Words that a user knows from elsewhere and that are no choice here: they are not misspelt, so no other is guessed."""

from __future__ import annotations

from collections.abc import Mapping

_NONE = ""

VALUES: Mapping[str, Mapping[str, str]] = {
    "model.activation": {
        **dict.fromkeys(("relu", "reglu", "silu", "swish", "quick_gelu", "elu", "selu", "mish", "tanh", "sigmoid"),
                        _NONE),
        "gelu_new": "its formula is gelu_tanh here", "gelu_pytorch_tanh": "its formula is gelu_tanh here",
        "squared_relu": "it is relu2 here", "relu_squared": "it is relu2 here",
        "geglu": "the tanh form of GELU is gated here, as geglu_tanh",
    },
    "model.position_embedding": {
        **dict.fromkeys(("alibi", "sinusoidal", "relative", "t5", "xpos", "fire", "kerple"), _NONE),
        "rotary": "it is rope here", "absolute": "it is learned here", "learned_absolute": "it is learned here",
        "nope": "model.rope_pattern = [\"none\"] with rope leaves positions out", "none": "",
    },
    "model.rope_scaling": dict.fromkeys(("dynamic", "longrope", "ntk", "su", "mrope"), _NONE),
    "model.normalization": dict.fromkeys(("batchnorm", "scalenorm", "groupnorm", "dyt", "none"), _NONE),
    "optimizer.name": {
        **dict.fromkeys(("lars", "rmsprop", "shampoo", "soap", "sophia", "adam8bit", "adamw8bit"),
                        "a plugin can add a rule (docs/optimizers.md)"),
        "adam": "adamw with optimizer.weight_decay = 0 is Adam",
    },
    "optimizer.decay": {
        **dict.fromkeys(("inverse-square-root", "polynomial", "exponential", "step", "onecycle"), _NONE),
    },
    "precision.dtype": {
        **dict.fromkeys(("int8", "int4", "fp4", "nvfp4", "tf32", "mxfp8"), _NONE),
        **dict.fromkeys(("int8", "int4"), "quantisation.weights trains for few bits"),
        "fp8": "set precision.fp8 beside dtype = \"bf16\"", "float32": "it is fp32 here", "float16": "it is fp16 here",
        "bfloat16": "it is bf16 here", "float64": "it is fp64 here", "half": "it is fp16 here",
    },
    "precision.fp8": dict.fromkeys(("blockwise", "delayed", "hybrid", "mxfp8", "e4m3"), _NONE),
    "backend.attention": {
        **dict.fromkeys(("xformers", "triton", "flex", "cudnn", "te", "transformer_engine", "ring"), _NONE),
        "flash": "it is flash_attn here", "flash_attention_2": "it is flash_attn here",
        "flash_attention_3": "it is fa3 here", "eager": "it is math here", "torch": "it is sdpa here",
    },
    "backend.device": {
        **dict.fromkeys(("mps", "xpu", "npu", "tpu", "hpu", "metal"), _NONE), "gpu": "say cuda or rocm",
        "hip": "it is rocm here", "amd": "it is rocm here", "nvidia": "it is cuda here",
    },
    "engine": dict.fromkeys(("fsdp", "fsdp2", "ddp", "megatron", "colossalai", "accelerate", "torchtitan", "nanotron"),
                            _NONE),
    "layout.pipeline_schedule": {
        **dict.fromkeys(("dualpipe", "zb-2p", "chimera", "pipedream", "looped_bfs"), _NONE),
        "interleaved": "set layout.virtual_pipeline_size with 1f1b", "zbv": "it is zb-v here",
        "interleaved1f1b": "set layout.virtual_pipeline_size with 1f1b", "afab": "it is gpipe here",
    },
    "layout.cp_method": {
        "ulysses": "it is heads here", "a2a": "it is heads here", "p2p": "it is ring here",
        "all_gather": "it is gather here", "allgather": "it is gather here",
    },
    "offload.optimizer": {"disk": "it is nvme here", "ssd": "it is nvme here", "ram": "it is cpu here"},
    "fine_tuning.method": dict.fromkeys(("qlora", "ia3", "prefix", "prompt", "adalora", "galore", "reft"), _NONE),
    "training.loss": {
        **dict.fromkeys(("kto", "simpo", "ipo", "rloo", "mse"), _NONE),
        **dict.fromkeys(("ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo"), "it is policy here, by policy.method"),
    },
    "activations.policy": {"selective_full": _NONE, "uniform": "it is full here", "block": "say plan"},
}
"""Dotted name → word of the field → what does the same here; empty: nothing does."""

KEYS: Mapping[str, str] = {
    "training.epochs": "a run counts optimizer steps: training.steps", "layout.tp": "it is layout.tensor_parallel_size",
    "layout.pp": "it is layout.pipeline_parallel_size", "layout.dp": "it is layout.data_parallel_size",
    "layout.cp": "it is layout.context_parallel_size", "layout.ep": "it is layout.expert_parallel_size",
    "layout.vp": "it is layout.virtual_pipeline_size", "optimizer.learning_rate": "it is optimizer.lr",
    "training.learning_rate": "it is optimizer.lr", "training.batch_size": "it is batch.global_batch_size",
    "batch.gradient_accumulation_steps": "it follows from batch.global_batch_size, batch.micro_batch_size and dp",
    "training.gradient_accumulation_steps": "it follows from batch.global_batch_size, batch.micro_batch_size and dp",
    "training.seed": "it is seed, above all tables", "model.n_layer": "it is model.num_layers",
    "model.n_embd": "it is model.hidden_size", "model.n_head": "it is model.num_attention_heads",
    "model.max_position_embeddings": "it is model.seq_length",
    "model.tie_word_embeddings": "it is model.tie_embeddings",
    "precision.bf16": "set precision.dtype = \"bf16\"", "precision.fp16": "set precision.dtype = \"fp16\"",
}
"""Keys of other systems → ours."""

COMMANDS: Mapping[str, str] = {
    "resume": "`train RUN` resumes", "finetune": "`train` with [fine_tuning] does it", "fine-tune": "`train` with "
    "[fine_tuning] does it", "convert": "`checkpoint export` and `checkpoint import` convert",
    "export": "it is `checkpoint export`", "import": "it is `checkpoint import`", "list": "`runs list` lists runs",
    "ls": "`runs list` lists runs", "status": "`runs show RUN` shows it", "prepare": "it is `data prepare`",
    "tokenize": "it is `data prepare`", "preprocess": "it is `data prepare`", "submit": "it is `launch submit`",
    "profile": "`train --profile` records traces", "monitor": "`watch RUN` is the live page",
    **dict.fromkeys(("serve", "server"), "others serve models: `checkpoint export --to hf` writes what they read"),
    "chat": "`generate --chat` answers one prompt", "quantize": _NONE,
    "rlhf": "`train` with training.loss = \"dpo\" learns preferences",
    "download": "`data fetch` gets a corpus", "benchmark": "it is `bench`", "eval": "it is `evaluate`",
}


def not_supported(word: str, *, of: str) -> str:
    """Return `` is not supported…`` with what does the same, for a word that is known from elsewhere; else empty.

    ``of``: ``key``, ``command``, or the dotted name of the setting whose value it is.
    """
    found = {"key": KEYS, "command": COMMANDS, **VALUES}.get(of, {}).get(word.lower())
    if found is None:
        return ""
    return f" is not supported{f' ({found})' if found else ''}"
