"""The configuration: frozen dataclasses, one for each part of the program.

A run is described once, by :class:`RunConfig`, loaded from TOML by
``config.loader`` and checked by ``config.checks``. The string under a field is
its help: ``config show`` and the reference in docs/ print it. A field with a
fixed list of values is a ``Literal``, one with a range has a type of
``config.ranges``; ``config.choices`` reads both for checks, errors and the reference. Sizes are counts,
times are seconds and memory is bytes unless the name says otherwise. 0 in a
field marked "derived" means: take the value that the property computes.

This module imports nothing of torch, so that a configuration can be checked in
milliseconds on a login node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megatron_port.core.config.features import (
    ActivationsConfig,
    DistillationConfig,
    FineTuningConfig,
    OffloadConfig,
    QuantisationConfig,
    SparsityConfig,
)
from megatron_port.core.config.machine import (
    CalibrationConfig,
    ClusterConfig,
    HardwareConfig,
    LaunchConfig,
    PreflightConfig,
    WatchConfig,
)
from megatron_port.core.config.model import ModelConfig, MoEConfig, RoutesConfig
from megatron_port.core.config.optimizer import OptimizerConfig, ParameterGroup
from megatron_port.core.config.ranges import (
    AbsolutePath,
    Count,
    CountOrZero,
    FolderName,
    NonNegative,
    PathSetting,
    PathText,
    Positive,
    RankSet,
    Size,
    SizeOrZero,
    SpikeFactor,
    StepSet,
    Text,
    TokenizerName,
    at_least,
)

__all__ = [
    "ActivationsConfig", "BackendConfig", "BatchConfig", "CalibrationConfig", "CheckpointConfig", "ClusterConfig",
    "DataConfig", "DistillationConfig", "FineTuningConfig", "HardwareConfig", "LaunchConfig", "LayoutConfig",
    "MoEConfig", "ModelConfig", "NumericsConfig", "OptimizerConfig", "ParameterGroup", "PrecisionConfig",
    "PreflightConfig", "QuantisationConfig", "RoutesConfig", "RunConfig", "SparsityConfig", "TelemetryConfig",
    "TrainingConfig", "WatchConfig",
]


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Split of the run over processes. Changing it changes no number beyond rounding."""

    tensor_parallel_size: Size = 1
    """Ranks that share each layer, t. Keep it within a node."""
    pipeline_parallel_size: Size = 1
    """Stages, p."""
    virtual_pipeline_size: Size = 1
    """Chunks of layers on each stage, v (engine native): interleaved 1f1b, or zb-v with 2."""
    data_parallel_size: SizeOrZero = 0
    """Replicas, d; 0: world size / (t * p)."""
    shard_size: SizeOrZero = 0
    """Replicas over which ZeRO splits optimizer state, a divisor of d; the others hold copies (hybrid sharding, engine
    native). 0: all of them."""
    context_parallel_size: Size = 1
    """Ranks that share the positions of a sequence, c (docs/context-parallelism.md)."""
    cp_method: Literal["gather", "heads", "ring"] = "gather"
    """Exchange between context-parallel ranks in attention: gather (every rank gets keys and values of all positions)
    | heads (each rank gets all positions of some heads; c divides a rank's key/value heads) | ring (keys and values go
    round; partial results are merged in fp32)"""
    cp_order: Literal["contiguous", "zigzag", "balanced"] = "zigzag"
    """Which positions a context-parallel rank holds: contiguous (one run of s/c) | zigzag (an early and a late run of
    s/2c: equal work without documents) | balanced (blocks divided by the work that documents and windows leave)"""
    expert_parallel_size: Size = 1
    """Ranks that share the experts of a layer, e (engine native): neighbours in a stage, first over tensor-parallel
    ranks, then over replicas. Each has whole experts."""
    sequence_parallel: bool = False
    """Split norms, dropout and residuals over the tensor-parallel ranks along the sequence."""
    tp_overlap_chunks: SizeOrZero = 0
    """Parts in which a layer's forward products run, each overlapping the collective of another; 0: as many as the
    planner finds to pay on the cluster, else 1 (docs/performance.md)"""
    tp_exchange: Literal["collective", "pairs", "symm_mem"] = "collective"
    """collective | pairs (of ranks, each beside a product) | symm_mem (torch's, NVLink, bf16); docs/performance.md"""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """0: replicated optimizer; 1: optimizer state split over the replicas; 2: gradient sums too, at the price of one
    reduce-scatter per micro-batch instead of one per step (engine native, schedules other than zb); 3: weights too,
    gathered layer by layer (engine native; docs/pipeline.md)."""
    reshard: Literal["forward", "step"] = "forward"
    """When ZeRO stage 3 frees the weights of a layer: forward (when the next layers need the memory, so they are
    gathered again for backward) | step (after all of the step's micro-batches)"""
    reduce_bucket_size: Size = 33_554_432
    """Most elements that one collective of gradients or weights moves between replicas; each moves those of one layer,
    embedding or head (engine native)."""
    pipeline_schedule: str = "1f1b"
    """gpipe | 1f1b (interleaved where v > 1) | zb-h1 | zb-v (v = 2), or a schedule that a plugin registers (engine
    native); docs/pipeline.md"""
    pipeline_split: tuple[int, ...] = ()
    """Transformer layers on each virtual stage, in order; empty: balanced by cost, embedding and head counted."""
    vocab_padding_multiple: Size = 128
    """The vocabulary is padded to a multiple of this times t; padded logits are masked."""
    elastic: bool = False
    """If started on another number of ranks than this layout's, continue with the nearest legal layout
    (docs/elastic.md) instead of stopping. The global batch stays the same."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Samples that one optimizer step consumes."""

    micro_batch_size: Size = 1
    """Samples in one forward pass of one replica."""
    global_batch_size: Size = 8
    """Samples in one optimizer step, over all replicas."""
    rampup_start: SizeOrZero = 0
    """Global batch of the first step; 0: no ramp-up."""
    rampup_increment: SizeOrZero = 0
    """Added at each stage of the ramp-up."""
    rampup_samples: SizeOrZero = 0
    """Samples over which the ramp-up reaches global_batch_size."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats."""

    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "bf16"
    """fp32 | bf16 | fp16 | fp64 (fp64: engine native, for proofs). bf16 and fp16 have fp32 masters and sums."""
    fp8: Literal["none", "tensorwise", "rowwise"] = "none"
    """none | tensorwise | rowwise: layers' linears in 8 bits, one scale per tensor or row; bf16; docs/performance.md"""
    grad_reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of gradients sent between replicas: fp32 | bf16 | fp16 (engine native; sums over micro-batches stay fp32).
    fp32 means full width, which is fp64 in an fp64 run."""
    initial_loss_scale: Positive = 65536.0
    """fp16: first loss scale."""
    loss_scale_window: Count = 1000
    """fp16: good steps before the scale doubles."""
    min_loss_scale: Positive = 1.0
    """fp16: the scale does not fall below this."""
    loss_scale_hysteresis: Count = 2
    """fp16: overflows before the scale is divided by two."""
    max_skipped_steps: Count = 50
    """fp16: overflows in a row after which training stops with exit 6."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Source of the tokens."""

    source: str = "corpus"
    """corpus (the files of train, or synthetic tokens), or a source that a plugin registers, which needs neither"""
    train: tuple[PathSetting, ...] = ()
    """Prefixes of .bin/.idx pairs, or their URLs (s3://, https://). Empty with synthetic = false is an error."""
    weights: tuple[float, ...] = ()
    """Blend weights, one for each prefix; empty: by number of tokens."""
    split: tuple[float, ...] = (0.98, 0.01, 0.01)
    """Fractions of the corpus for training, validation and test."""
    synthetic: bool = False
    """Draw reproducible random tokens instead of reading a corpus."""
    tokenizer: TokenizerName = "auto"
    """auto (what the corpus' sidecar names) | byte | gpt2 | tiktoken:ENCODING | hf:FILE | sentencepiece:FILE"""
    order: Literal["stateless", "megatron"] = "stateless"
    """stateless (one permutation per epoch) | megatron (Megatron-LM's document order; seeds below 2^32, as there)"""
    index_cache: PathSetting = ""
    """Folder for the sample index of order megatron and of packing; empty: output_dir/data_cache. It is built once for
    each folder that processes share (a node's own disk works), or ahead of time by `data index`."""
    remote_cache: PathSetting = ""
    """Folder for the index of corpora in a store and the blocks of tokens that were read; empty: that of index_cache.
    A node's own disk is best."""
    remote_cache_gb: NonNegative = 0.0
    """Largest size of each corpus' blocks there, in GB; the least recently used are removed. 0: no limit."""
    pinned: bool = True
    """Stop a resumed run (exit 4) if its corpora or tokenizer are not those of its checkpoint; false: print a line."""
    mask_eod_loss: bool = False
    """Leave out of the loss the predictions made at an end-of-document token (Megatron-LM's convention)."""
    attention_documents: Literal["across", "within"] = "across"
    """across (attention sees all of the sample before a token) | within (only the token's own document)"""
    packing: Literal["none", "first_fit"] = "none"
    """none (a sample is the next seq_length tokens) | first_fit (whole documents in each sample, padded at its end,
    for fine-tuning; with attention_documents = "within")"""
    position_reset: bool = False
    """With attention_documents = "within": count learned positions from each document's start. Rotary positions do not
    need it: attention depends only on their differences."""
    document_length: NonNegative = 0.0
    """With attention_documents = "within": mean over tokens of the length of a token's document (Σ ℓ² ÷ Σ ℓ of the
    parts within samples), from which attention's operations and seconds are counted; 0: from the corpus' index."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The loop."""

    steps: Count = 100
    """Optimizer steps."""
    loss: str = "cross_entropy"
    """Loss that training minimises: cross_entropy, or one that a plugin registers, averaged over tokens (evaluations
    report the cross-entropy); or dpo, averaged over pairs of answers (docs/preferences.md)."""
    z_loss: NonNegative = 0.0
    """Factor of log²(Σ exp(logit)), which is added to each token's loss in training so that logits stay small (PaLM,
    arXiv 2204.02311: 1e-4). The loss that steps report has it, evaluations do not. 0: none."""
    dpo_beta: Positive = 0.1
    """With loss = "dpo": factor of the rewards, which are log-probabilities minus those of the reference. With a
    larger factor the model stays nearer to the reference."""
    eval_interval: CountOrZero = 0
    """Steps between evaluations; 0: only at the end when eval_batches > 0."""
    eval_batches: CountOrZero = 0
    """Global batches in one evaluation, at most the whole split; each sample counts once. 0: no evaluation."""
    log_interval: Count = 1
    """Steps between lines on the console (metrics.jsonl has every step)."""
    hooks: tuple[str, ...] = ()
    """Hooks of the loop that plugins register (CONTRIBUTING.md), in the order in which they are asked."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    save_interval: CountOrZero = 0
    """Steps between checkpoints; 0: only at the end."""
    save_final: bool = True
    """Save after the last step. A run stopped by a signal always saves."""
    keep: CountOrZero = 2
    """Checkpoints kept; older ones are removed after a commit. 0: all."""
    asynchronous: bool = True
    """Save in the background, from a copy of this rank's state in host memory; the step pays for the copy only. The
    last save, or one on a signal, is synchronous."""
    verify_saves: bool = True
    """Read every file back and compare it before the checkpoint is committed."""
    max_failures: CountOrZero = 3
    """Saves in a row that may fail (disk full, no permission) before training stops with exit 5. 0: never stop."""
    resume: PathText = "auto"
    """auto (newest complete checkpoint of the run folder, if any) | never | a path or s3:// URL (of a checkpoint, or a
    folder of them). A damaged one is passed over for the one before it, with a line; a URL or a single one is not."""
    optimizer_state: Literal["same", "fresh"] = "same"
    """Handling of a checkpoint of another optimizer rule than optimizer.name: same (refuse it) | fresh (take the
    weights; the new rule's state and count of updates start afresh, once). One of the same rule is always continued."""
    lease_seconds: Positive = 60.0
    """One attempt at a time uses a run folder. The next takes over once its heartbeat has not changed for so many
    seconds, where its host cannot be checked; where its process or SLURM job is known to be gone, at once."""
    memory_interval: CountOrZero = 0
    """Steps between copies of the state on the nodes, two of them, from which a run resumes first; 0: none."""
    memory_folder: AbsolutePath = "/dev/shm"
    """Folder of each node that holds them: memory, or a disk of its own."""
    disk_interval: CountOrZero = 0
    """Steps between copies that each node's disk gets too, for a start that finds none in memory; 0: none."""
    disk_folder: AbsolutePath = "/var/tmp"
    """Folder of each node that holds these, on a disk."""
    mirror: PathSetting = ""
    """URL below which every committed checkpoint is copied in the background (s3://bucket/folder); `checkpoint.resume`
    accepts it. A failed copy costs a line, not the run."""
    initial_weights: PathSetting = ""
    """Weights that a run starts from if it has nothing to resume (fine-tuning): a Hugging Face folder (safetensors), a
    run folder or a checkpoint. Moments and counters start fresh. Experts start as copies of a dense layer's MLP."""


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Device and providers, chosen once at start."""

    device: Literal["auto", "cpu", "cuda", "rocm"] = "auto"
    """auto | cpu | cuda | rocm"""
    share_devices: bool = False
    """Let several ranks compute on one GPU. Their collectives then use gloo and host memory: slow, but it lets you try
    layouts. false: ranks that find themselves on one GPU stop."""
    own_kernels: Literal["auto", "on", "off"] = "auto"
    """Meaning of ``auto`` for the ops below: auto (own kernels where built and supported) | on (they, or stop) | off"""
    attention: Literal["auto", "own", "math", "sdpa", "flash_attn", "varlen", "fa3", "fa4", "ck", "aiter"] = "auto"
    """auto (GPUs: by configs/kernels; own under dropout) | own (GPUs: fp16, bf16, heads of up to 128) | math | sdpa |
    flash_attn | varlen (torch's, for documents and windows) | fa3 | fa4 (for torch's flash) | ck | aiter (AMD)"""
    norm: str = "auto"
    """auto | own | apex | torch; for this and the next five ops also a provider that a plugin registers"""
    activation: str = "auto"
    """auto | own | torch: bias + GeLU, SwiGLU"""
    rotary: str = "auto"
    """auto | own | torch: splitting the packed projection and rotating queries and keys"""
    dropout: str = "auto"
    """auto | own | torch: bias + dropout + residual; both drop the same elements"""
    softmax: str = "auto"
    """auto | own | torch: the causal softmax of ``math`` attention"""
    cross_entropy: str = "auto"
    """auto | own | torch"""
    experts: Literal["auto", "own", "torch"] = "auto"
    """auto | own | torch: router and movement of rows under model.moe; both give the same bits"""
    experts_exchange: Literal["torch", "deepep", "mori"] = "torch"
    """torch | deepep (NVIDIA, bf16) | mori (AMD, bf16 and fp32): exchange of token rows between the ranks that share
    experts. The last two are packages that must be installed; all give the same bits."""
    quantise: Literal["auto", "own", "torch"] = "auto"
    """auto | own | torch: casts to 8 bits under precision.fp8; both give the same bits"""
    scaled_mm: Literal["auto", "torch", "reference"] = "auto"
    """auto | torch | reference (8-bit values multiplied in fp32, for tests): products under precision.fp8"""
    products: Literal["auto", "torch", "lt"] = "auto"
    """auto (lt where the card's table has it faster) | torch | lt (cublasLt or hipBLASLt, measured at start)"""
    optimizer: Literal["auto", "own", "deepspeed", "apex", "torch"] = "auto"
    """auto | own (engine native) | deepspeed (CPUAdam or FusedAdam) | apex | torch"""
    collective_priority: Literal["auto", "high", "normal"] = "auto"
    """Streams of NCCL or RCCL: auto (high for tp, cp, ep and pp groups; docs/performance.md) | high (all) | normal"""
    tuned_products: PathSetting = ""
    """ROCm: CSV file of TunableOp with an algorithm by shape (docs/kernels.md); nothing is tuned. Empty: defaults."""
    graphs: Literal["auto", "off", "step"] = "auto"
    """auto (step on an NVIDIA GPU, unless another setting or a plugin forbids it; the log says which) | off | step
    (CUDA or HIP graphs: a step's launches are captured once and replayed; docs/performance.md)"""
    allow_jit: bool = False
    """Permit building ops at run time (DeepSpeed, cpp_extension, Triton, torch.compile). false: it is an error."""
    deterministic: bool = False
    """Ask torch for deterministic algorithms (bit-exact resume on GPUs)."""


@dataclass(frozen=True, kw_only=True)
class NumericsConfig:
    """What is done with a step whose loss or gradient cannot be trusted. Such a step is never applied."""

    on_anomaly: Literal["skip", "stop", "rewind"] = "skip"
    """skip (continue with the next samples) | stop (exit 6) | rewind (return to the last checkpoint; samples that
    cause it again are removed from the order)"""
    loss_spike: SpikeFactor = 3.0
    """A loss above this times the running median is an anomaly, and so is one above 1.25 times that of guessing
    (ln(vocab_size), or the first step's loss where it is larger); 0: only one not finite. One below 1 nat never is."""
    grad_norm_spike: SpikeFactor = 100.0
    """The same for the gradient norm; 0: only a norm that is not finite. A norm below optimizer.clip_grad never is."""
    window: Annotated[int, at_least(2)] = 64
    """Applied steps in the running medians. Until half of them are known, the largest value is used instead of the
    median, from 8 steps on."""
    max_anomalies: Count = 10
    """Anomalies within 1,000 steps after which training stops with exit 6, whatever on_anomaly is."""
    state_check_interval: Annotated[int, at_least(-1)] = -1
    """Updates between checks that only updates changed this rank's weights, masters and moments: they are hashed after
    an update and before the next (docs/metrics.md); engine native's reduced gradients at the same steps. -1: every
    update, on GPUs as often as costs about 1 % of a step of this many tokens; 0: never."""
    replay_interval: CountOrZero = 0
    """Steps between replays of a micro-batch on another replica, whose results must be bitwise equal: finds devices
    that compute wrongly (docs/metrics.md). On GPUs it needs backend.deterministic. 0: never."""


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Outputs that describe a run."""

    tensorboard: bool = False
    """Also write TensorBoard events (optional dependency)."""
    wandb: Literal["off", "offline", "online"] = "off"
    """off | offline (files below the run's folder) | online: Weights & Biases (optional dependency)"""
    mlflow: Literal["off", "offline", "online"] = "off"
    """off | offline (files below the run's folder) | online (the server that MLFLOW_TRACKING_URI names)"""
    project: Text = "megatron_port"
    """Project (Weights & Biases) or experiment (MLflow) that the run is filed under."""
    replica_check_interval: CountOrZero = 100
    """Steps between checks that replicated parameters are equal on all ranks; 0: never."""
    published_tflops: NonNegative = 0.0
    """A published rate to print beside this run's, hardware TFLOP/s per device; 0: none."""
    published_source: str = ""
    """Where that rate was published."""
    profile: StepSet = ""
    """Optimizer steps of which torch's profiler writes traces (docs/profiling.md), e.g. 10-12,500; next: the third to
    fifth of this start. Empty: none, at no cost."""
    profile_ranks: RankSet = "0"
    """Ranks whose steps are traced, e.g. 0,8-15, or all; their traces are merged into one timeline."""
    profile_memory: bool = False
    """Also record allocations, and on GPUs write a memory snapshot after the traced steps."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run."""

    name: FolderName = "run"
    """Name of the run; its folder is output_dir/name."""
    output_dir: PathText = "runs"
    """Where run folders live."""
    seed: CountOrZero = 1234
    """Seed of weights, data order and dropout."""
    engine: Literal["native", "deepspeed"] = "native"
    """native | deepspeed (optional dependency: pip install "megatron_port[deepspeed]")"""
    plugins: tuple[str, ...] = ()
    """Python modules that are imported when the configuration is loaded and register further choices: optimizer rules,
    losses, schedules, data sources, kernels (CONTRIBUTING.md). They run as programs: name those that you trust."""
    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    moe: RoutesConfig = field(default_factory=RoutesConfig)
    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    fine_tuning: FineTuningConfig = field(default_factory=FineTuningConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    quantisation: QuantisationConfig = field(default_factory=QuantisationConfig)
    sparsity: SparsityConfig = field(default_factory=SparsityConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
