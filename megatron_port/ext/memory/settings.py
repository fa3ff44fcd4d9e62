"""Settings of memory: training state in host memory or on a disk, and activations that a layer does not keep."""

from __future__ import annotations

from megatron_port.core.config.conflicts import NO_ENGINE, Conflict, Rule, Table, native_only
from megatron_port.core.config.features import OffloadConfig
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.registry import OBJECTIVES

WHOLE_MATRICES = ("adafactor", "came", "sm3", "lamb", "muon")
"""Rules whose update of an element depends on others, which other ranks or buckets may have."""
_BY_NORM = "the host updates one bucket after another, by the norm alone and without an average"


def _asked(config: RunConfig) -> str:
    """Return the first setting that asks for an offload: the beginning of a sentence."""
    o = config.offload
    name = next((n for n in ("optimizer", "weights") if getattr(o, n) != "none"), "")
    return f'offload.{name} "{getattr(o, name)}"' if name else "an [offload] section"


def _first(config: RunConfig) -> list[str]:
    """Return a fault that makes the other checks of an offload pointless."""
    if config.engine != "native":
        return [f'{_asked(config)} with engine "{config.engine}", which keeps all state on the device; {NO_ENGINE}']
    return [f'{_asked(config)} with offload.optimizer "none", which offloads nothing; set offload.optimizer = "cpu" '
            'or "nvme", or leave the section out'] if config.offload.optimizer == "none" else []


def _host_kernel(config: RunConfig) -> list[str]:
    backend = config.backend
    without = f'backend.optimizer "{backend.optimizer}"' if backend.optimizer not in ("auto", "own") else (
        'backend.own_kernels "off"' if backend.own_kernels == "off" else "")
    return [f'{_asked(config)} with optimizer.name "adamw" and {without}: the host updates by the own AdamW kernel; '
            'set backend.optimizer = "auto" and backend.own_kernels = "auto" (make kernels builds them), or use no '
            "offload"] if without and config.optimizer.name == "adamw" else []


def _offloads(config: RunConfig) -> bool:
    """Return whether state is offloaded, by the engine that can."""
    return config.offload.optimizer != "none" and config.engine == "native"


OFFLOAD = (
    Table(on=lambda c: c.offload != OffloadConfig(), more=(_first,)),
    Table(asked='offload.optimizer "{c.offload.optimizer}"', on=_offloads, rows=(
        Conflict("layout.zero_stage", "where every replica would update all the state in its host's memory",
                 "use zero_stage 1, 2 or 3", refused=(0,)),
        Conflict("optimizer.name", "the host updates one bucket after another, and this rule needs whole matrices or "
                                   "sums over them", "use one that updates elements or blocks (adamw, adamw-bf16, "
                                   "adamw-8bit, lion, sgd, adagrad), or no offload", refused=WHOLE_MATRICES),
        Conflict("precision.dtype", "state on the host is fp32", "use fp32, bf16 or fp16", refused=("fp64",)),
        Rule(lambda c: c.offload.optimizer == "nvme" and not c.offload.nvme_path.strip(),
             "{asked} without offload.nvme_path; set it to a folder on a local disk"),
        Conflict("checkpoint.asynchronous", "the copy that is saved beside training would take host memory for all the "
                 "state", "set checkpoint.asynchronous = false", refused=(True,),
                 when=lambda c: c.offload.optimizer == "nvme"),
        Rule(lambda c: c.offload.optimizer != "nvme" and c.offload.nvme_path,
             'offload.nvme_path with {asked}, which writes no files; use optimizer = "nvme", or leave the path out'),
    ), more=(_host_kernel,)),
    Table(asked='offload.optimizer "{c.offload.optimizer}"', on=lambda c: c.offload.optimizer != "none", rows=(
        Conflict("optimizer.clip_value", _BY_NORM, "use 0, or no offload"),
        Conflict("optimizer.ema_decay", _BY_NORM, "use 0, or no offload"),
    )),
    Table(asked='offload.weights "cpu"', on=lambda c: _offloads(c) and c.offload.weights == "cpu", rows=(
        Conflict("layout.zero_stage", "which keeps whole weights on the device",
                 'use zero_stage 3, or weights = "none"', allowed=(3,)),
        Conflict("offload.fraction", "weights on the host are updated there", 'use fraction = 1, or weights = "none"',
                 when=lambda c: c.offload.fraction < 1.0),
    )),
)


def _described(config: RunConfig) -> bool:
    """Return whether the cluster says what a device is and holds."""
    return config.cluster.memory_gb > 0 and bool(config.hardware.device or config.hardware.matmul_tflops)


def _plan(config: RunConfig) -> list[str]:
    a, layers = config.activations, config.model.num_layers
    if a.policy != "plan" and (a.layers or (a.budget and a.policy != "profile")):
        return [f'activations.budget and activations.layers are for policy "plan", and it is "{a.policy}"']
    if a.policy == "profile" and not a.budget and not _described(config):
        return ['activations.policy "profile" needs to know how much fits; set activations.budget, or extend one of '
                "configs/clusters (cluster.memory_gb and [hardware])"]
    if a.layers and len(a.layers) != layers:
        return [f"activations.layers has {len(a.layers)} entries, and the model has {layers} layers; give one for each "
                "(empty: nothing is recomputed), or leave it [] for the planner to fill in"]
    if a.policy == "plan" and not a.layers and not _described(config):
        return ['activations.policy "plan" needs to know the device; extend one of configs/clusters (cluster.memory_gb '
                'and [hardware]), or use "full", "selective" or "none"']
    return []


TILE = 128
"""Rows of the largest tile that products on GPUs have."""
CHUNK_BYTES = 1 << 28
"""Logits of a chunk that the planner chooses: products of many rows, and little memory."""


def chosen_chunk(columns: int, width: int) -> int:
    """Return the tokens whose logits, of so many columns on a rank and ``width`` bytes each, are at most 256 MiB; a
    multiple of a product's tile, where they are more than one."""
    tokens = max(CHUNK_BYTES // (columns * width), 1)
    return tokens - tokens % TILE if tokens > TILE else tokens


ACTIVATIONS = (
    Table(more=(_plan,), rows=(
        Rule(lambda c: c.engine != "native" and any(":" in sites for sites in c.activations.layers),
             'activations.layers with :swap or :partition need engine = "native"; recompute or keep these sites'),
    )),
    Table(asked="activations.head_chunk {c.activations.head_chunk}", on=lambda c: c.activations.head_chunk != 0, rows=(
        native_only("whose pipeline passes whole logits to the loss", 'use engine = "native", or head_chunk = 0'),
        Conflict("training.loss", "a plugin's objective, which is given whole logits", "use 0",
                 when=lambda c: c.training.loss in OBJECTIVES.added),
        Conflict("layout.zero_stage", "which has the weights of the teacher's head no longer where the loss makes its "
                 "logits in chunks", "use zero_stage 2, distillation.logits, or head_chunk = 0",
                 refused=(3,), when=lambda c: c.distillation.online),
    )),
)
