"""Settings of every run that contradict one another: providers of ops, data, precision, pipeline schedules."""

from __future__ import annotations

from megatron_port.core.config.conflicts import Rule, Table
from megatron_port.core.config.loader import did_you_mean
from megatron_port.core.config.ranges import is_remote, url_fault
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.registry import LOOP_HOOKS, OWN_UPDATES, SCHEDULES, unknown_choices

BYTE_VOCABULARY = 257
"""256 bytes and the end of a document."""
GPT2_VOCABULARY = 50257
"""Entries of GPT-2's byte-pair encoding."""
_OWN_OPS = ("norm", "activation", "rotary", "dropout", "softmax", "cross_entropy", "experts", "optimizer")
_ONLY_GPU = {
    "attention": ("flash_attn", "varlen", "fa3", "fa4", "ck", "aiter"), "norm": ("apex",), "optimizer": ("apex",),
}
_TOKENIZERS = ("auto", "byte", "gpt2")


def _own_ops(config: RunConfig) -> list[str]:
    """Name what own kernels that were asked for cannot do."""
    backend, dtype = config.backend, config.precision.dtype
    asked = next((op for op in _OWN_OPS if getattr(backend, op) == "own"), "")
    out = []
    if asked and dtype == "fp64":
        out.append(f"backend.{asked} own takes fp32, fp16 and bf16, not precision.dtype 'fp64'; use auto")
    if asked and backend.own_kernels == "off":
        out.append(f"backend.{asked} is own, but backend.own_kernels is 'off'; set one of the two to auto")
    return out


def _hooks(config: RunConfig) -> list[str]:
    """Name hooks of the loop that are unknown, or twice in the list."""
    hooks = config.training.hooks
    known = ", ".join(LOOP_HOOKS.names) or "none: no plugin registers one"
    unknown = unknown_choices(LOOP_HOOKS.field, hooks)
    twice = [name for name in dict.fromkeys(hooks) if hooks.count(name) > 1]
    return [
        *(f"training.hooks has {name!r}, which is unknown; use {known}" for name in unknown),
        *(f"training.hooks has {name!r} twice; leave one out" for name in twice),
    ]


def _gpu_only(config: RunConfig) -> list[str]:
    asked = {name: getattr(config.backend, name) for name in _ONLY_GPU}
    return [f"backend.{name} {value} needs a GPU, but backend.device is 'cpu'; use auto"
            for name, value in asked.items() if config.backend.device == "cpu" and value in _ONLY_GPU[name]]


def _adamw_only(config: RunConfig) -> bool:
    """Return whether the provider of updates has none of the run's rule."""
    provider, rule = config.backend.optimizer, config.optimizer.name
    own = rule in OWN_UPDATES and provider == "own"
    return provider not in ("auto", "torch") and rule != "adamw" and not own


def _reads_files(config: RunConfig) -> bool:
    """Return whether the samples come from files of tokens."""
    return not config.data.synthetic and config.data.source == "corpus"


def _places(config: RunConfig) -> list[str]:
    """Name corpora, folders and URLs that cannot be where they are said to be."""
    data, out = config.data, []
    if data.tokenizer not in _TOKENIZERS and not data.tokenizer.startswith(("tiktoken:", "hf:", "sentencepiece:")):
        out.append(
            f"data.tokenizer is {data.tokenizer!r}; it must be one of {', '.join(_TOKENIZERS)}, tiktoken:ENCODING, "
            f"hf:FILE, sentencepiece:FILE{did_you_mean(data.tokenizer, list(_TOKENIZERS))}"
        )
    out += [f"data.train: {fault}" for prefix in data.train if is_remote(prefix) and (fault := url_fault(prefix))]
    for name, url in (("mirror", config.checkpoint.mirror), ("resume", config.checkpoint.resume)):
        if (is_remote(url) or (name == "mirror" and url)) and (fault := url_fault(url, writable=True)):
            out.append(f"checkpoint.{name}: {fault}")
    here = {"output_dir": config.output_dir, "checkpoint.initial_weights": config.checkpoint.initial_weights,
            "distillation.teacher": config.distillation.teacher, "distillation.logits": config.distillation.logits,
            "data.index_cache": data.index_cache, "data.remote_cache": data.remote_cache}
    return out + [
        f"{name} {place!r}: a store is not supported there; give a folder of this machine or of a file system that "
        "all nodes share (checkpoint.mirror copies checkpoints into a store)"
        for name, place in here.items() if is_remote(place)
    ]


def _blend(config: RunConfig) -> list[str]:
    """Name weights of corpora and fractions of their parts that cannot be."""
    data, split, batches, out = config.data, config.data.split, config.training.eval_batches, []
    if data.weights and len(data.weights) != len(data.train):
        out.append(f"data.weights has {len(data.weights)} entries for {len(data.train)} corpora in data.train")
    if any(w <= 0 for w in data.weights):
        out.append(f"data.weights {list(data.weights)}: each must be above 0")
    if len(split) != 3 or any(not 0 <= f <= 1 for f in split) or abs(sum(split) - 1) > 1e-6:
        out.append(
            f"data.split {list(split)} sums to {round(sum(split), 9)}; it must be three fractions (training, "
            "validation, test) that sum to 1, e.g. [0.98, 0.01, 0.01]"
        )
    elif _reads_files(config) and split[0] == 0:
        out.append(f"data.split {list(split)} leaves nothing for training")
    elif _reads_files(config) and batches and split[1] == 0:
        out.append(
            f"training.eval_batches is {batches}, but data.split {list(split)} leaves nothing for validation; use e.g. "
            "[0.98, 0.01, 0.01]"
        )
    return out


def _vocabulary(config: RunConfig) -> list[str]:
    least = {"byte": BYTE_VOCABULARY, "gpt2": GPT2_VOCABULARY}.get(config.data.tokenizer, 0)
    return [
        f"model.vocab_size {config.model.vocab_size} is smaller than the {config.data.tokenizer} tokenizer's {least}; "
        f"use {least}"
    ] if _reads_files(config) and 1 <= config.model.vocab_size < least else []


def _chunks(config: RunConfig) -> list[str]:
    """Name a number of chunks that the schedule does not have."""
    v, schedule = config.layout.virtual_pipeline_size, config.layout.pipeline_schedule
    if schedule == "zb-v" and v != 2:
        return [
            f"layout.pipeline_schedule 'zb-v' folds two chunks onto each stage, and virtual_pipeline_size is {v}; use 2"
        ]
    return [
        f"layout.pipeline_schedule {schedule!r} has one chunk a stage, and virtual_pipeline_size is {v}; use 1, or the "
        "schedule '1f1b' (interleaved)" + (" or 'zb-v'" if v == 2 else "")
    ] if schedule in ("gpipe", "zb-h1", *SCHEDULES.added) and v > 1 else []


_BACKEND = Table(sized=True, more=(_gpu_only, _own_ops, _hooks), rows=(
    Rule(lambda c: c.model.attention_dropout > 0 and c.backend.attention not in ("auto", "own", "math"),
         "model.attention_dropout {c.model.attention_dropout} needs backend.attention auto, own or math, not "
         "{c.backend.attention!r}: only those keep the mask free of the layout; or set attention_dropout = 0"),
    Rule(lambda c: c.backend.attention in _ONLY_GPU["attention"] and c.precision.dtype not in ("fp16", "bf16"),
         "backend.attention {c.backend.attention} needs precision.dtype fp16 or bf16, not {c.precision.dtype!r}"),
    Rule(lambda c: c.backend.own_kernels == "on" and c.precision.dtype == "fp64",
         "backend.own_kernels on needs precision.dtype fp32, fp16 or bf16, not 'fp64'; use auto"),
    Rule(_adamw_only,
         "backend.optimizer {c.backend.optimizer} is an update of adamw, not of optimizer.name {c.optimizer.name!r}, "
         "which brings its own; use auto"),
    Rule(lambda c: c.backend.optimizer == "own" and c.engine != "native",
         "backend.optimizer own is for engine native, not {c.engine!r}; use auto"),
))
_DATA = Table(more=(_places, _blend, _vocabulary), rows=(
    Rule(lambda c: c.data.source != "corpus" and (c.data.synthetic or c.data.train or c.data.mask_eod_loss),
         "data.source {c.data.source!r} brings its own samples; leave out data.train, data.synthetic and "
         "data.mask_eod_loss, or set data.source = 'corpus'"),
    Rule(lambda c: _reads_files(c) and not c.data.train,
         "data.train is empty; give prefixes of .bin/.idx pairs, or set data.synthetic = true"),
    Rule(lambda c: any(not prefix.strip() for prefix in c.data.train),
         "data.train has an empty name; each entry is the prefix of a .bin/.idx pair"),
    Rule(lambda c: c.numerics.on_anomaly == "rewind" and c.data.order == "megatron",
         "numerics.on_anomaly rewind leaves samples out, and data.order megatron has exactly as many as the run's "
         "steps; use skip or stop, or data.order stateless"),
    Rule(lambda c: _reads_files(c) and c.data.order == "megatron" and c.seed >= 2**32,
         "seed is {c.seed}; data.order megatron shuffles as Megatron-LM does, with numpy's RandomState, which takes "
         f"seeds below 2^32 = {2**32}; use a smaller one, or data.order stateless"),
    Rule(lambda c: c.data.position_reset and c.data.attention_documents == "across",
         "data.position_reset counts positions from each document's start, and data.attention_documents 'across' knows "
         "no documents; set attention_documents = 'within', or leave position_reset out"),
    Rule(lambda c: c.data.position_reset and c.model.position_embedding == "rope",
         "data.position_reset with model.position_embedding 'rope' changes nothing but rounding: attention within a "
         "document sees differences of positions only; leave it out"),
    Rule(lambda c: c.training.eval_interval and not c.training.eval_batches,
         "training.eval_interval is {c.training.eval_interval}, but eval_batches is 0; e.g. eval_batches = 10"),
))
_PACKING = Table(asked='data.packing "{c.data.packing}"', on=lambda c: c.data.packing != "none", rows=(
    Rule(lambda c: c.data.attention_documents == "across",
         "{asked} with data.attention_documents 'across': a document would see those packed beside it; use "
         "attention_documents = 'within'"),
    Rule(lambda c: c.data.order == "megatron",
         "{asked} with data.order 'megatron', which cuts documents where a sample ends; use order 'stateless'"),
    Rule(lambda c: c.data.synthetic, "{asked} with data.synthetic, whose samples are whole; leave one of the two out"),
    Rule(lambda c: c.data.source != "corpus",
         "{asked} with data.source {c.data.source!r}, which brings its own samples; leave packing out"),
))
_STEP = Table(more=(_chunks,), rows=(
    Rule(lambda c: 0 < c.precision.initial_loss_scale < c.precision.min_loss_scale,
         "precision.initial_loss_scale {c.precision.initial_loss_scale} is below min_loss_scale "
         "{c.precision.min_loss_scale}"),
    Rule(lambda c: c.layout.zero_stage == 2 and c.layout.pipeline_schedule.startswith("zb-"),
         "layout.zero_stage 2 with pipeline_schedule {c.layout.pipeline_schedule!r}: its backward passes are split in "
         "two, and each part would have to be reduced by itself, twice the traffic; use zero_stage 1, or the schedule "
         "'1f1b'"),
))
CONFLICTS = (_BACKEND, _DATA, _PACKING, _STEP)
