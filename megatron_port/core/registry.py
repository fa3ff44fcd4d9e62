"""Names that a configuration may choose from, and what each stands for: the package's own, and what plugins add.

A plugin is a Python module that is imported when a configuration is loaded (``config.choices``) and that calls
:meth:`Registry.add`::

    from megatron_port.core.registry import OPTIMIZERS

    OPTIMIZERS.add("signum", "signum_rule:SIGNUM")

The second argument is the object itself, or where it is, ``"module:attribute"``: that module is imported when the
object is first used, so that commands which only check need not import torch. CONTRIBUTING.md has a page for each kind
with what the object must be.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from megatron_port.core.errors import ConfigError

T = TypeVar("T")


class Registry:
    """The choices of one configuration field.

    Args:
        what: the kind of thing, for messages.
        field: dotted name of the field that chooses one, or lists several.
        builtin: name → ``"module:attribute"`` of the package's own choices; None: the package handles that name itself,
            and it is only reserved here.
        derived: the same of names that follow from other settings, and that ``field`` does not take.
    """

    def __init__(
        self, what: str, field: str, builtin: Mapping[str, str | None], derived: Mapping[str, str] | None = None
    ) -> None:
        self.what, self.field = what, field
        self._builtin, self._derived = dict(builtin), dict(derived or {})
        self._added: dict[str, Any] = {}

    @property
    def builtin(self) -> tuple[str, ...]:
        """The package's own choices."""
        return tuple(self._builtin)

    @property
    def names(self) -> tuple[str, ...]:
        """All choices, the package's own first."""
        return (*self._builtin, *self._added)

    @property
    def added(self) -> tuple[str, ...]:
        """The choices that plugins have added."""
        return tuple(self._added)

    def add(self, name: str, target: Any) -> None:
        """Add a choice.

        Args:
            name: what ``field`` is set to.
            target: the object, or ``"module:attribute"``.

        Raises:
            ConfigError: the name is taken, or is not a word.
        """
        if not name or not name.replace("-", "_").replace(".", "_").isidentifier():
            raise ConfigError(
                f"{self.what} {name!r}: a name has letters, digits, '_', '-' and '.' and starts with a letter"
            )
        if name in self._builtin or name in self._derived:
            raise ConfigError(f"{self.what} {name!r} is megatron_port's own; register the plugin's under another name")
        if name in self._added:
            raise ConfigError(
                f"{self.what} {name!r} is registered twice, as {_shown(self._added[name])} and as {_shown(target)}; "
                "rename one of the two, or leave one plugin out"
            )
        self._added[name] = target

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function that a name stands for. Raises ConfigError as :meth:`get` does."""
        found = self.get(name, object)
        if not callable(found):
            raise ConfigError(f"{self.what} {name!r} is {_shown(found)}, which cannot be called; register a function")
        return found

    def get(self, name: str, of: type[T]) -> T:
        """Return what a name stands for, which must be an instance of ``of``.

        Raises:
            ConfigError: there is none of that name, its module cannot be imported, or it is something else.
        """
        target = {**self._builtin, **self._derived, **self._added}.get(name)
        if target is None:
            known = ", ".join(self.names)
            raise ConfigError(f"{self.field} {name!r} is unknown here; use {known}, or name its module in `plugins`")
        found = _resolved(target, f"{self.what} {name!r}") if isinstance(target, str) else target
        if not isinstance(found, of):
            raise ConfigError(
                f"{self.what} {name!r} is {_shown(found)}, which is no {of.__name__}; see CONTRIBUTING.md for what it "
                "must be"
            )
        return found


def _resolved(reference: str, what: str) -> Any:
    """The object at ``"module:attribute"``."""
    module, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a plugin may raise anything
        raise ConfigError(f"{what} is said to be {reference!r}, but {type(error).__name__}: {error}") from error


def _shown(target: Any) -> str:
    """Return the location of a target, for messages."""
    if isinstance(target, str):
        return target
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{named.__module__}:{named.__qualname__}"


OPTIMIZERS = Registry("optimizer rule", "optimizer.name", {
    "adamw": "megatron_port.core.optim.rules:ADAMW",
    "adamw-bf16": "megatron_port.ext.kernels.narrow_adamw:ADAMW_BF16",
    "adamw-8bit": "megatron_port.ext.kernels.narrow_adamw:ADAMW_8BIT",
    "lion": "megatron_port.ext.kernels.lion:LION",
    "sgd": "megatron_port.ext.rules.elementwise:MOMENTUM_SGD",
    "adagrad": "megatron_port.ext.rules.elementwise:ADAGRAD",
    "adafactor": "megatron_port.ext.rules.factored:ADAFACTOR",
    "came": "megatron_port.ext.rules.factored:CAME_RULE",
    "sm3": "megatron_port.ext.rules.factored:SM3_RULE",
    "lamb": "megatron_port.ext.rules.matrices:LAMB_RULE",
    "muon": "megatron_port.ext.rules.matrices:MUON",
})

OWN_UPDATES = ("adamw", "adamw-bf16", "adamw-8bit", "lion")
"""Optimizer rules that own kernels update."""

FALLING = ("cosine", "linear", "wsd")
"""The package's learning-rate schedules that reach ``min_lr`` at ``decay_steps``, which must be after the warm-up."""
LR_SCHEDULES = Registry("learning-rate schedule", "optimizer.decay", {
    name: f"megatron_port.core.optim.schedules:{'falling' if name in FALLING else name}"
    for name in ("cosine", "linear", "constant", "wsd", "inverse_sqrt")
})
"""Pure functions ``(settings, step, total_steps) -> rate`` of the updates after the warm-up."""

LOSSES = Registry(
    "loss", "training.loss", {"cross_entropy": "megatron_port.core.layers.cross_entropy:vocab_parallel_cross_entropy"}
)
"""Losses of one token."""

OBJECTIVES = Registry(
    "objective", "training.loss", {name: f"megatron_port.ext.objectives.{name}:{kind}Objective" for name, kind in (
        ("dpo", "Pair"), ("orpo", "OddsRatio"), ("policy", "Policy"), ("weighted", "Weighted"))},
    derived={
        "next_token": "megatron_port.core.data.objective:Objective",
        "multi_token": "megatron_port.ext.objectives.multi_token:MultiTokenObjective",
        "distillation": "megatron_port.ext.objectives.distilled:DistillationObjective",
    },
)
"""Made from a run's configuration (``data.objective.Objective``). A loss of ``LOSSES`` is a token's, of which
``next_token`` is the mean; an objective has its own count, and tensors beside tokens and labels."""

SCHEDULES = Registry("pipeline schedule", "layout.pipeline_schedule", {
    "gpipe": "megatron_port.core.pipeline.schedules:gpipe", "1f1b": "megatron_port.core.pipeline.schedules:one_f_one_b",
    "zb-h1": "megatron_port.ext.pipeline.zero_bubble:ZB_H1", "zb-v": "megatron_port.ext.pipeline.zero_bubble:zb_v",
})
SAMPLES = Registry("order of samples", "", {
    "stateless": "megatron_port.core.data.loader:stateless_samples",
    "first_fit": "megatron_port.ext.corpora.packing:packed_samples",
    "megatron": "megatron_port.ext.corpora.megatron_order:megatron_samples",
})
"""By ``data.packing``, else ``data.order``: what makes the dataset of each split of a run from its corpora."""
SOURCES = Registry("data source", "data.source", {
    "corpus": None, "rollouts": "megatron_port.ext.objectives.rollout_source:rollouts",
})
FAMILIES = Registry("model family", "model.family", {
    "auto": None,
    "gpt2": "megatron_port.ext.families.gpt2:FAMILY", "gpt_neox": "megatron_port.ext.families.gpt_neox:FAMILY",
    **{name: f"megatron_port.ext.families.{name}:FAMILY"
       for name in ("llama", "qwen2", "qwen3", "granite", "starcoder2", "mistral", "phi3", "deepseek_v3", "olmo2",
                    "smollm3", "gptj", "falcon", "gemma2", "gemma3_text", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe",
                    "deepseek_v2", "gpt_oss", "qwen3_next", "qwen3_5_text", "lfm2", "bamba", "kimi_linear",
                    "olmo_hybrid", "granitemoehybrid", "mamba2", "nemotron_h", "falcon_h1")},
})
"""By ``model_type`` of Hugging Face. ``auto`` is the first of the others that computes a model."""
MIXERS = Registry("mixer", "model.mixer", {
    "attention": None,
    **{name: f"megatron_port.ext.mixers.{name}:KIND"
       for name in ("gated_delta", "kda", "mamba2", "short_conv", "attention_mamba2")},
})
"""Sequence mixers of a layer (``config.model.MixerKind``)."""
PROVIDERS = {
    op: Registry(f"provider of {op}", f"backend.{op}", dict.fromkeys(("auto", "own", *others, "torch")))
    for op, others in {
        "norm": ("apex",), "activation": (), "rotary": (), "dropout": (), "softmax": (), "cross_entropy": (),
    }.items()
}
"""By op. ``auto`` never takes a plugin's: it is used where a configuration asks for it."""

LOOP_HOOKS = Registry("loop hook", "training.hooks", {})
"""Hooks of a run's training loop: functions, as a rule classes, from the loop's state to a ``train.hooks.LoopHook``."""

STEP_PARTS = Registry("part of a step", "", {
    "own update": "megatron_port.ext.kernels.own_updates:own_update",
    "own update with narrow moments": "megatron_port.ext.kernels.fused_rule_update:narrow_update",
    "own update on the host": "megatron_port.ext.kernels.fused_rule_update:host_calls",
    "own row hashes": "megatron_port.ext.kernels.choose:row_hashes_of",
    "own gradient accumulation": "megatron_port.ext.kernels.gradient_sums:SumsTogether",
    "stage 3 or offloaded parameters": "megatron_port.ext.memory.held:held_parameters",
    "adaptive clipping": "megatron_port.ext.rules.adaptive_clipping:AdaptiveClipping",
    "offloaded update": "megatron_port.ext.memory.offloaded_update:host_update",
    "state check": "megatron_port.ext.health.state_check:check_of",
    "state watch": "megatron_port.ext.health.state_watch:CheckedState",
    "gradient masks": "megatron_port.ext.weights.masks:GradientMasks",
    "rule with averaged weights": "megatron_port.ext.weights.masks:Averaged",
    "average of weights": "megatron_port.ext.weights.masks:WeightAverage",
    "probed step": "megatron_port.ext.health.probed_step:probed_step",
    "graph capturer": "megatron_port.ext.kernels.step_graphs:cuda_graph_capturer",
    "captured steps": "megatron_port.ext.kernels.step_graphs:CapturedSteps",
})
"""Factories of the parts of engine native's step that few runs have, imported when a run asks for them."""
PARTS = Registry("part", "", {
    "8-bit matmuls": "megatron_port.ext.kernels.choose_fp8:choose_products",
    "activation, relu2": "megatron_port.ext.kernels.activations:squared_relu",
    "activation, swiglu_clamped": "megatron_port.ext.kernels.activations:clamped_swiglu",
    "activation plan": "megatron_port.tools.plan.activation_plan:with_activation_plan",
    "activation planner": "megatron_port.tools.plan.planner_hook:ActivationPlanner",
    "activation recompute": "megatron_port.ext.memory.recompute:recompute",
    "activation swap and partition": "megatron_port.ext.memory.site_tape:parking_places",
    "adapter": "megatron_port.ext.weights.adapters:make_adapter",
    "adapters of a layer": "megatron_port.ext.weights.adapter_spec:layer_adapters",
    "balanced context-parallel divisions": "megatron_port.ext.context.balance:divisions_by_documents",
    "chunk starts": "megatron_port.ext.mixers.chunks:chunk_starts",
    "chunked head": "megatron_port.ext.memory.chunked_head:ChunkedHead",
    "context-parallel attention": "megatron_port.ext.context.attention:context_attention",
    "context-parallel checks": "megatron_port.ext.context.checks:context_checks",
    "context-parallel division": "megatron_port.ext.context.division:divide",
    "copies in memory": "megatron_port.ext.storage.partner_copies:committed_copies",
    "corpus checks at start": "megatron_port.ext.corpora.checked_tokens:check_at_start",
    "corpus tokenizer": "megatron_port.ext.corpora.corpus_tokenizer:tokenizer_of",
    "document length": "megatron_port.ext.corpora.document_length:document_length",
    "experiment tracker": "megatron_port.ext.telemetry.trackers:tracker",
    "expert kernels": "megatron_port.ext.kernels.choose_experts:choose_experts",
    "expert layer spec": "megatron_port.ext.experts.spec:moe_spec",
    "expert token counts": "megatron_port.ext.telemetry.expert_file:counts_of",
    "expert token file": "megatron_port.ext.telemetry.expert_file:ExpertSink",
    "expert-parallel checks": "megatron_port.ext.experts.checks:divided_experts",
    "few-bit matmuls": "megatron_port.ext.weights.few_bits:FewBitLinearKernels",
    "host memory": "megatron_port.ext.memory.host_memory:host_bytes",
    "gated attention": "megatron_port.ext.mixers.gated_spec:gated_attention",
    "Hugging Face folder": "megatron_port.tools.interop.hf_files:open_sampled",
    "initial decay rates": "megatron_port.ext.mixers.initial:decay_rates",
    "initial decay rates from 1": "megatron_port.ext.mixers.initial:decay_rates_from_1",
    "initial time steps": "megatron_port.ext.mixers.initial:time_steps",
    "is a Hugging Face folder": "megatron_port.tools.interop.hf_files:is_hf",
    "latent attention": "megatron_port.ext.mixers.latent_spec:latent_attention",
    "layers by chunk": "megatron_port.run.build:layers_by_chunk",
    "low-rank column linear": "megatron_port.ext.weights.low_rank:FactoredColumnLinear",
    "low-rank row linear": "megatron_port.ext.weights.low_rank:FactoredRowLinear",
    "multi-token prediction modules": "megatron_port.ext.objectives.multi_token:build_predictions",
    "name in another framework": "megatron_port.ext.advice.elsewhere:not_supported",
    "no feed-forward block": "megatron_port.ext.mixers.no_block_spec:no_block",
    "nearest legal layout": "megatron_port.ext.advice.nearest_layout:legal_neighbour",
    "object blocks": "megatron_port.ext.storage.store:Blocks",
    "object store": "megatron_port.ext.storage.store:Store",
    "measured products": "megatron_port.ext.kernels.choose_products:choose_lt",
    "overlapped column linear": "megatron_port.ext.weights.chunked:overlapped_column",
    "overlapped row linear": "megatron_port.ext.weights.chunked:overlapped_row",
    "packed documents": "megatron_port.ext.kernels.packed_documents:pack_documents",
    "partial attention, math": "megatron_port.ext.context.attention:MathPartial",
    "partial attention, own": "megatron_port.ext.kernels.ops.attention:OwnPartial",
    "partial attention, fused": "megatron_port.ext.context.fused:FusedPartial",
    "PEFT folder": "megatron_port.tools.interop.peft:PeftFolder",
    "pipeline schedule check": "megatron_port.ext.pipeline.checks:check_added",
    "plugin data source": "megatron_port.ext.corpora.plugin_source:plugin_datasets",
    "preference pairs": "megatron_port.ext.corpora.packing:PairDataset",
    "prefetch of remote corpora": "megatron_port.ext.corpora.fetch:ReadAhead",
    "query and key norm over all heads": "megatron_port.ext.mixers.projection_norm:ProjectionNorm",
    "reference of preference pairs": "megatron_port.ext.objectives.pairs:read_reference",
    "remote corpus": "megatron_port.ext.corpora.fetch:RemoteCorpus",
    "replay check": "megatron_port.ext.health.replay:ReplayCheck",
    "replica check": "megatron_port.ext.health.replicas:ReplicaCheck",
    "rotary scaling, linear": "megatron_port.ext.mixers.rotary_scalings:LINEAR",
    "rotary scaling, llama3": "megatron_port.ext.mixers.rotary_scalings:LLAMA3",
    "rotary scaling, yarn": "megatron_port.ext.mixers.rotary_scalings:YARN",
    "scaled feed-forward block": "megatron_port.ext.mixers.scaled_mlp_spec:scaled_mlp",
    "snapshot hashes": "megatron_port.ext.health.snapshot_hashes:SnapshotHashes",
    "stages of shared layers": "megatron_port.ext.weights.shared_layers:stages_of_shared_layers",
    "TensorBoard": "megatron_port.ext.telemetry.trackers:TensorBoardSink",
    "tensor-parallel parts": "megatron_port.tools.plan.overlap:with_tensor_chunks",
    "time limit of corpus checks": "megatron_port.ext.corpora.checked_tokens:TimeLimit",
    "token dispatch, deepep": "megatron_port.ext.experts.exchanges:DeepEP",
    "token dispatch, mori": "megatron_port.ext.experts.exchanges:Mori",
    "token hash checks": "megatron_port.ext.corpora.checked_tokens:CheckedTokens",
    "tokenizer check": "megatron_port.ext.corpora.verify:check_tokenizers",
    "verified files": "megatron_port.ext.storage.ranged:verified_files",
    "weight folder reader": "megatron_port.run.weights:open_weights",
    "weight sharing between layers": "megatron_port.ext.weights.shared_layers:share_weights",
})
"""Functions of other packages that the core, or a package of ext, imports and calls where a setting or a file asks."""

FORMER_NAMES = Registry("former names of parameters", "", {
    "model.mtp_layers": "megatron_port.ext.objectives.former_names:mtp_experts",
})
"""By the setting of a feature whose parameters had other names: (manifest's configuration) → former prefix → new."""
ALWAYS = "always"
CONFLICTS = Registry("table of conflicts", "", {setting: target for target, settings in {
    "megatron_port.ext.families.settings:OPTIONS": (
        "model.position_embedding", "model.rotary_percent", "model.rope_pattern", "model.rope_scaling",
        "model.attention_scale", "model.window_rope_theta", "model.shared_norm", "model.mup_base_size",
        "model.qk_norm_over", "model.norm_bias", "model.qkv_bias", "model.mlp_bias", "model.head_bias",
        "model.norm_pattern", "model.mlp_multipliers"),
    "megatron_port.ext.families.settings:WINDOWS": ("model.attention_pattern", "model.attention_chunk"),
    "megatron_port.ext.kernels.settings:PROVIDERS": ("backend.attention",),
    "megatron_port.ext.mixers.settings:LATENTS": (
        "model.kv_lora_rank", "model.q_lora_rank", "model.qk_rope_head_dim", "model.v_head_dim",
        "model.latent_norm_epsilon"),
    "megatron_port.ext.mixers.settings:MIXER": (
        "model.mixer", "model.mixer_pattern", "model.recurrent", "model.mlp_pattern"),
    "megatron_port.ext.objectives.settings:MULTI_TOKEN": ("model.mtp_layers",),
    "megatron_port.ext.weights.settings:FACTORS": (
        "model.qkv_rank", "model.output_rank", "model.up_rank", "model.down_rank", "model.shared_layers"),
    "megatron_port.run.conflicts:CONFLICTS": (ALWAYS,),
    "megatron_port.ext.kernels.settings:FP8": ("precision.fp8",),
    "megatron_port.ext.experts.checks:CONFLICTS": ("model.moe", "moe", "layout.expert_parallel_size"),
    "megatron_port.core.config.optimizer:CONFLICTS": ("optimizer",),
    "megatron_port.ext.kernels.settings:NARROW_STATE": ("optimizer.name",),
    "megatron_port.ext.deepspeed.settings:CONFLICTS": ("engine",),
    "megatron_port.ext.objectives.settings:LOSSES": ("training.loss", "training.z_loss"),
    "megatron_port.ext.objectives.policy_settings:ROLLOUTS": ("data.source", "policy", "rollouts", "orpo"),
    "megatron_port.ext.memory.settings:OFFLOAD": ("offload",),
    "megatron_port.ext.storage.settings:RECOVERY": ("launch.when_lost", "watch.replace_percent",
                                                          "checkpoint.disk_interval"),
    "megatron_port.ext.kernels.settings:GRAPHS": ("backend.graphs",),
    "megatron_port.ext.kernels.settings:PRODUCTS": ("backend.products",),
    "megatron_port.ext.weights.settings:ADAPTERS": ("fine_tuning",),
    "megatron_port.ext.objectives.settings:TEACHER": ("distillation",),
    "megatron_port.ext.weights.settings:MASKS": ("sparsity",),
    "megatron_port.ext.weights.settings:FEW_BITS": ("quantisation",),
    "megatron_port.ext.weights.settings:EXCHANGES": ("layout.tp_exchange",),
    "megatron_port.ext.memory.settings:ACTIVATIONS": ("activations",),
}.items() for setting in settings})
"""By the settings that ask for a feature: tuples of ``config.conflicts.Table``, which a check reads where one of those
settings is not at its default; those of ``ALWAYS``, and of a plugin, in every check."""
SECTIONS = Registry("section", "", {
    name: f"megatron_port.ext.objectives.policy_settings:{name.capitalize()}Config" for name in (
        "orpo", "policy", "rollouts")})
"""By name of its table in a run file: a dataclass of settings, frozen, keyword-only, with a default for each field."""

REGISTRIES = (
    OPTIMIZERS, LR_SCHEDULES, LOSSES, OBJECTIVES, SCHEDULES, SOURCES, FAMILIES, MIXERS, LOOP_HOOKS,
    *PROVIDERS.values(),
)
"""Every registry of the package."""


def builtin_choices(field: str) -> tuple[str, ...]:
    """Return the package's own choices of a configuration field, of all registries."""
    return tuple(name for registry in REGISTRIES if registry.field == field for name in registry.builtin)


def choices_added(field: str) -> tuple[str, ...]:
    """Return what plugins have added to the choices of a configuration field."""
    return tuple(name for registry in REGISTRIES if registry.field == field for name in registry.added)


def unknown_choices(field: str, value: Any) -> list[Any]:
    """Return which names of a configuration field, one or a list, are none of its choices."""
    names = value if isinstance(value, (tuple, list)) else (value,)
    return [name for name in names if name not in (*builtin_choices(field), *choices_added(field))]
