"""Every legal layout of a run on its ranks, planned; and those near the one asked for that are better.

Pure functions of a case and a machine. A search plans the pipeline in closed
form (``timeline.quick_span``); the best of it (``finalists``), and what is shown
to a user, are simulated with the schedule that the engine runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megatron_port.core.config.checks import problems
from megatron_port.core.config.choices import CHOICES
from megatron_port.core.config.dump import leaves
from megatron_port.core.config.layout import divisors, expert_cuts, legal_tensor_sizes, with_values
from megatron_port.core.config.schema import RunConfig
from megatron_port.ext.memory.sites import layer_choices
from megatron_port.tools.plan.case import Case, Machine, balanced_split, checked_data
from megatron_port.tools.plan.elements import expert_elements, stage_elements, trained_elements
from megatron_port.tools.plan.exchanges import work_imbalance
from megatron_port.tools.plan.memory import StageMemory, held_bytes, stage_memory
from megatron_port.tools.plan.step import StepPlan, plan_step

RECOMPUTE = ("none", "selective", "full")
FINALISTS = 16
"""Layouts that are simulated before the best are named."""
LEAST_HELD = 4096
"""Positions that a rank holds at the least where a search divides sequences; below, other axes serve."""


NEUTRAL: dict[str, Any] = {
    "layout.tensor_parallel_size": 1, "layout.pipeline_parallel_size": 1, "layout.virtual_pipeline_size": 1,
    "layout.pipeline_split": (), "layout.sequence_parallel": False, "layout.expert_parallel_size": 1,
    "batch.micro_batch_size": 1, "cluster.nodes": 0,
}
"""A layout that any run has: what is wrong with it is not the layout's fault."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Values that a search may try."""

    worlds: tuple[int, ...]
    """Numbers of devices."""
    tensor: tuple[int, ...]
    most_stages: int
    chunks: tuple[int, ...] = (1,)
    shards: tuple[int, ...] = ()
    """Sizes of the groups that shard state (layout.shard_size); empty: the case's."""
    micro: tuple[int, ...] = (1, 2, 4, 8, 16)
    recompute: tuple[str, ...] = RECOMPUTE
    sequence: tuple[bool, ...] = (False, True)
    schedules: tuple[str, ...] = ()
    """Pipeline schedules by the name in the run file; empty: the case's."""
    zero: tuple[int, ...] = ()
    """ZeRO stages; empty: the case's."""
    experts: tuple[int, ...] = (1,)
    """Expert-parallel sizes, of which those are tried that fit the other sizes."""
    context: tuple[int, ...] = (1,)
    """Context-parallel sizes."""
    methods: tuple[str, ...] = ("gather",)
    """Methods of context parallelism, of which those are tried that fit the other sizes."""
    orders: tuple[str, ...] = ("zigzag",)
    """Orders of a sequence's positions, of which the most even is taken."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout: its plan and the rank that needs most memory."""

    case: Case
    step: StepPlan
    memory: StageMemory

    def fits(self, machine: Machine) -> bool:
        """Whether its fullest rank fits the device."""
        return self.memory.total <= machine.cluster.memory_gb * 1e9


def legal_chunks(schedule: str, chunks: int) -> bool:
    """The schedule can have so many chunks a stage (the rule of ``config.checks``)."""
    return schedule == "1f1b" or chunks == (2 if schedule == "zb-v" else 1)


def options_of(config: RunConfig, case: Case) -> Options:
    """Return what a run's engine and model allow on the ranks of ``case``."""
    interleaves = not any(
        "virtual_pipeline_size" in p
        for p in problems(with_values(config, {
            "layout.virtual_pipeline_size": 2, "layout.pipeline_schedule": "1f1b", "layout.pipeline_split": (),
        }))
    )
    tensor = legal_tensor_sizes(config, case.world)
    return Options(
        worlds=(case.world,), tensor=tuple(t for t in tensor if t <= config.cluster.gpus_per_node),
        most_stages=config.model.num_layers, chunks=(1, 2, 3, 4, 6, 8) if interleaves else (1,),
        experts=_expert_sizes(config), context=_context_sizes(config, case.world),
        methods=_context_choices(config, "cp_method"), orders=_context_choices(config, "cp_order"),
    )


def allowed(neutral: RunConfig, name: str, asked: RunConfig) -> tuple[Any, ...]:
    """Return a choice's values that the run's engine takes, with one or two chunks per stage; the run's own first."""
    table, _, key = name.rpartition(".")
    now = getattr(getattr(asked, table), key)

    def taken(value: Any) -> bool:
        changed = [
            with_values(neutral, {name: value, "layout.virtual_pipeline_size": v, "layout.pipeline_parallel_size": p})
            for v, p in ((1, 1), (2, 2)) if v * p <= neutral.model.num_layers
        ]
        return any(not problems(c, world_size=c.layout.pipeline_parallel_size) for c in changed)

    return (now, *(v for v in CHOICES[name] if v != now and taken(v)))


def _expert_sizes(config: RunConfig) -> tuple[int, ...]:
    """Expert-parallel sizes that a run's model and engine allow."""
    moe = config.model.moe
    return tuple(divisors(moe.num_experts)) if moe.enabled and config.engine == "native" else (1,)


def _takes(config: RunConfig, size: int, **values: str) -> bool:
    """Whether a run's engine and model take a context-parallel size, whatever else its layout is."""
    layout = {f"layout.{name}": value for name, value in values.items()}
    found = problems(with_values(config, {
        **NEUTRAL, **layout, "layout.context_parallel_size": size, "layout.data_parallel_size": 1,
    }))
    return not any("context_parallel_size" in p or "cp_" in p for p in found)


def _context_sizes(config: RunConfig, world: int) -> tuple[int, ...]:
    """Context-parallel sizes that a run's model and engine allow and its sequences are long enough for."""
    own, seq = config.layout.context_parallel_size, config.model.seq_length
    sizes = {c for c in divisors(world) if seq // c >= LEAST_HELD} | {1, own}
    return tuple(c for c in sorted(sizes) if c == own or _takes(config, c))


def _context_choices(config: RunConfig, name: str) -> tuple[str, ...]:
    """Values of a field of context parallelism that the engine takes, the run's own first. A ring is a run's own or is
    not tried: on a GPU it has other kernels of attention."""
    own = getattr(config.layout, name)
    others = [v for v in CHOICES[f"layout.{name}"] if v not in (own, "ring")] if own != "ring" else []
    return (own, *(str(v) for v in others if _takes(config, 2, **{name: str(v)})))


def layouts(base: Case, options: Options) -> Iterator[Case]:
    """Every legal layout of ``base``'s model, engine and global batch on the options' ranks."""
    for world in options.worlds:
        for tp, cp in product(options.tensor, options.context):
            for pp in divisors(world // (tp * cp)) if world % (tp * cp) == 0 else []:
                dp = world // (tp * cp * pp)
                if pp > options.most_stages or base.global_batch % dp:
                    continue
                for vp in options.chunks:
                    if vp == 1 or (pp > 1 and base.model.num_layers % (pp * vp) == 0):
                        yield from _of_split(replace(base, tp=tp, pp=pp, vp=vp, cp=cp, dp=dp), options)


def _of_split(base: Case, options: Options) -> Iterator[Case]:
    """The layouts with the tp, pp, vp and dp of ``base``."""
    base = replace(base, split=balanced_split(base.model, base.pp * base.vp))
    names = tuple(n for n in options.schedules or (base.schedule,) if legal_chunks(n, base.vp))
    if not options.schedules:
        names = names or ("1f1b",)
    if base.pp == 1:
        names = names[:1]  # without a pipeline all are the same
    pieces = base.tp * base.cp * (1 if base.cp == 1 else 2)  # of zigzag's chunks
    sequence = [s for s in options.sequence if not s or (base.tp > 1 and base.model.seq_length % pieces == 0)]
    recompute = [r for r in options.recompute if r != "selective" or not base.flash]  # fused attention keeps no scores
    for micro in options.micro:
        count, rest = divmod(base.global_batch // base.dp, micro)
        if rest or (base.vp > 1 and count % base.pp):
            continue
        for split_sequence in sequence:
            for again in recompute:
                stages = options.zero or (base.zero_stage,)
                if base.dp * base.cp == 1:
                    stages = stages[:1]  # without replicas all are the same
                for zero, shard in product(stages, options.shards or (base.shard,)):
                    legal = expert_cuts(base.tp, base.cp, base.dp, math.gcd(shard, base.dp))[1]
                    sizes = [e for e in options.experts if e in legal]
                    for name, ep, (method, order) in product(names, sizes, _ways_of_context(base, micro, options)):
                        yield replace(
                            base, micro_batch=micro, micro_batches=count, sequence_parallel=split_sequence,
                            recompute=again, dropped=(), zero_stage=zero, shard=shard, schedule=name, ep=ep,
                            cp_method=method, cp_order=order,
                        )


def _ways_of_context(base: Case, micro: int, options: Options) -> list[tuple[str, str]]:
    """(method, order) of context parallelism to try; one where sequences are not divided."""
    if base.cp == 1:
        return [(base.cp_method, base.cp_order)]
    seq = base.model.seq_length
    orders = [order for order in options.orders if order != "zigzag" or seq % (2 * base.cp) == 0]
    even = min(
        orders, key=lambda order: work_imbalance(order, base.cp, seq, document=base.document, samples=micro),
        default=base.cp_order,
    )
    keys = base.model.kv_heads_held(base.tp) // base.tp
    heads = keys % base.cp == 0 or (base.cp % keys == 0 and base.model.num_attention_heads // base.tp % base.cp == 0)
    return [(method, even) for method in options.methods if method != "heads" or heads]


def settings_of(config: RunConfig, case: Case) -> dict[str, Any]:
    """The leaves of ``config`` that give the layout of ``case``, by dotted name; ``with_values`` takes them.

    Nodes and replicas stay 0 where the run leaves them to whoever starts it.
    """
    out: dict[str, Any] = {
        "layout.tensor_parallel_size": case.tp, "layout.pipeline_parallel_size": case.pp,
        "layout.virtual_pipeline_size": case.vp,
        "layout.data_parallel_size": case.dp if config.layout.data_parallel_size else 0,  # 0: derived
        "layout.sequence_parallel": case.sequence_parallel,
        "activations.policy": "plan" if case.dropped else case.recompute,
        "layout.zero_stage": case.zero_stage, "batch.micro_batch_size": case.micro_batch,
        "layout.pipeline_schedule": case.schedule,
    }
    if case.cp > 1 or config.layout.context_parallel_size > 1:
        out |= {
            "layout.context_parallel_size": case.cp, "layout.cp_method": case.cp_method,
            "layout.cp_order": case.cp_order,
        }
    if config.model.moe.enabled:
        out["layout.expert_parallel_size"] = case.ep
    if config.activations.policy == "plan" or case.dropped:
        own = config.activations
        kept = case.dropped and case.dropped == layer_choices(own, config.model.num_layers)
        out |= {} if kept else {"activations.layers": (), "activations.budget": 0.0}
    if config.layout.shard_size or case.shard:
        out["layout.shard_size"] = case.shard_size if case.shard else 0
    if (case.reshard if case.zero_stage == 3 else "forward") != config.layout.reshard:
        out["layout.reshard"] = case.reshard if case.zero_stage == 3 else "forward"
    if max(config.layout.tp_overlap_chunks, 1) != case.tensor_chunks and case.tp > 1:
        out["layout.tp_overlap_chunks"] = case.tensor_chunks
    if case.offload != "none" and config.offload.fraction != case.offload_fraction:
        out["offload.fraction"] = case.offload_fraction
    balanced = case.split == balanced_split(case.model, case.pp * case.vp)
    if case.split != config.layout.pipeline_split and (config.layout.pipeline_split or not balanced):
        out["layout.pipeline_split"] = () if balanced else case.split
    if case.engine.name != config.engine:
        out["engine"] = case.engine.name
    if (case.offload, case.offload_weights) != (config.offload.optimizer, config.offload.weights == "cpu"):
        out |= {
            "offload.optimizer": case.offload, "offload.weights": "cpu" if case.offload_weights else "none",
            "offload.nvme_path": config.cluster.local_disk if case.offload == "nvme" else "",
        }
    out["cluster.nodes"] = -(-case.world // config.cluster.gpus_per_node) if config.cluster.nodes else 0
    return out


def flags_of(config: RunConfig, case: Case, other: Case) -> str:
    """``--set`` of what has to change from one layout of a run to another."""
    was, wanted = settings_of(config, case), settings_of(config, other)
    words = {True: "true", False: "false"}
    texts = {
        k: words[v] if isinstance(v, bool) else json.dumps(list(v)).replace(" ", "") if isinstance(v, tuple) else v
        for k, v in wanted.items() if was.get(k, _plain(config, k)) != v
    }
    return " ".join(f"--set {k}={v}" for k, v in texts.items()) or "as it is"


def _plain(config: RunConfig, name: str) -> Any:
    return dict(leaves(config))[name]


def ends(case: Case) -> list[int]:
    """Activations fall from the first stage on: only the ends and one between can need most."""
    return sorted({0, min(1, case.pp - 1), case.pp - 1})


def elements_of(case: Case, stage: int) -> tuple[int, int, int]:
    """(held, trained, of experts) of a rank of a stage."""
    return stage_elements(case, stage), trained_elements(case, stage), expert_elements(case, stage, trained=False)


def fullest(case: Case, machine: Machine) -> StageMemory:
    """The stage that needs most."""
    return max((stage_memory(case, machine, s, quick=True) for s in ends(case)), key=lambda m: m.total)


def search(base: Case, machine: Machine, options: Options, *, keep_unfit: bool = False) -> list[Candidate]:
    """All layouts that fit, fastest first (``keep_unfit``: the others too, after them, least memory first)."""
    found, limit = [], machine.cluster.memory_gb * 1e9
    for case in layouts(base, options):
        # Weights, gradients and optimizer state alone; the rest costs more to count.
        if not keep_unfit and any(sum(held_bytes(case, *elements_of(case, stage))) > limit for stage in ends(case)):
            continue
        memory = fullest(case, machine)
        if keep_unfit or memory.total <= limit:
            found.append(Candidate(case=case, step=plan_step(case, machine, quick=True), memory=memory))

    def rank(c: Candidate) -> tuple[bool, float, float]:
        return (False, c.step.seconds, c.memory.total) if c.fits(machine) else (True, c.memory.total, 0.0)

    return sorted(found, key=rank)


def finalists(
    found: Iterable[Candidate], machine: Machine, *, count: int = FINALISTS,
    legal: Callable[[Candidate], bool] | None = None,
) -> list[Candidate]:
    """The best ``count`` of planned layouts that fit (and are ``legal``), simulated, fastest a device first.

    ``found``: best first in closed form, which is within 5 % of the simulation.
    """
    chosen: list[Candidate] = []
    for candidate in found:
        if len(chosen) == count:
            break
        if candidate.fits(machine) and (legal is None or legal(candidate)):
            chosen.append(replace(candidate, step=plan_step(candidate.case, machine)))
    return sorted(chosen, key=lambda c: (-c.step.model_tflops, c.memory.total))


def is_legal(config: RunConfig, case: Case) -> bool:
    """Whether training would take a run with this layout."""
    changed = replace(with_values(config, settings_of(config, case)), data=checked_data(config))
    return not problems(changed, world_size=case.world)


def distance(a: Case, b: Case) -> float:
    """Return how far two layouts are apart: octaves of tp and pp, half of those of dp, cp, ep, micro-batch and chunks;
    half a point for each switch and each ZeRO stage."""
    whole = (a.tp, b.tp), (a.pp, b.pp)
    half = (a.dp, b.dp), (a.micro_batch, b.micro_batch), (a.vp, b.vp), (a.ep, b.ep), (a.cp, b.cp)
    octaves = sum(abs(math.log2(x / y)) for x, y in whole) + sum(abs(math.log2(x / y)) / 2 for x, y in half)
    switches = 0.5 * (a.sequence_parallel != b.sequence_parallel) + 0.5 * (a.recompute != b.recompute)
    switches += 0.5 * (a.cp_method != b.cp_method and a.cp > 1 and b.cp > 1)
    return octaves + switches + 0.5 * abs(a.zero_stage - b.zero_stage)


def better(
    case: Case, seconds: float, found: list[Candidate], machine: Machine, *, count: int = 3,
    legal: Callable[[Candidate], bool] | None = None,
) -> list[Candidate]:
    """Up to ``count`` fitting layouts within two octaves that are faster, simulated, fastest first.

    ``seconds``: of what there is, simulated as they are; nothing slower is returned.
    """
    near = [c for c in found if c.fits(machine) and c.case != case and distance(case, c.case) <= 2.5]
    near = [c for c in near[: 6 * count] if legal is None or legal(c)]
    out = []
    for candidate in near[: 3 * count]:
        step = plan_step(candidate.case, machine)
        if step.seconds < seconds:
            out.append(replace(candidate, step=step))
    return sorted(out, key=lambda c: c.step.seconds)[:count]
