"""Parameters of each rank, from the specs of the units that its stage holds.

``tests/unit/test_plan_memory.py`` compares them with the meta model's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from megatron_port.core.config.features import NO_ADAPTERS, FineTuningConfig
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.spec import LayerSpec, ParameterSpec
from megatron_port.ext.weights.adapter_spec import layer_adapters
from megatron_port.tools.plan.case import Case

Elements = dict[str, int]
"""Trained elements by the kind of bucket that they are in (``optim.buckets``): plain, partial (each tensor-parallel
rank has its tokens' or its heads' part of the gradient), shared (key/value projections that several ranks hold),
tied, experts (whose state fewer ranks split: ``Case.expert_shards``)."""


@dataclass(frozen=True)
class _Split:
    """Ranks that divide the parameters of a layer."""

    tp: int
    ep: int
    sequence_parallel: bool

    @classmethod
    def of(cls, case: Case) -> _Split:
        """Return the split of a case."""
        return cls(case.tp, case.ep * case.etp, case.sequence_parallel)


def stage_kinds(case: Case, stage: int) -> list[tuple[LayerSpec, int]]:
    """The layers of a stage over all its chunks: each kind, and how many there are of it."""
    out: list[tuple[LayerSpec, int]] = []
    for start, stop in case.of_stage(case.layer_ranges, stage):
        for layer, count in model_spec(case.model).kinds(start, stop):
            same = next((i for i, (known, _) in enumerate(out) if known == layer), None)
            if same is None:
                out.append((layer, count))
            else:
                out[same] = (layer, out[same][1] + count)
    return out


def weight_ranges(case: Case, stage: int) -> list[tuple[int, int]]:
    """Layers [start, stop) whose weights a stage holds: its own, or the first of each group that shares weights."""
    ranges = case.of_stage(case.layer_ranges, stage)
    if case.model.shared_layers == 1:
        return list(ranges)
    owners = {case.model.owner_of(layer) for start, stop in ranges for layer in range(start, stop)}
    return [(owner, owner + 1) for owner in sorted(owners)]


def spanning_elements(case: Case, stage: int) -> int:
    """Elements of a rank's layers of which other stages hold copies, whose gradients are summed over those."""
    if case.model.shared_layers == 1:
        return 0
    elsewhere = {
        owner for other in range(case.pp) if other != stage for owner, _ in weight_ranges(case, other)
    }
    split = _Split.of(case)
    return sum(
        count for owner, stop in weight_ranges(case, stage) if owner in elsewhere
        for _, count in _layers(case.model, owner, stop, split, NO_ADAPTERS)
    )


def bucket_elements(case: Case, stage: int) -> Elements:
    """Elements of a rank's trained parameters by kind, the padding of buckets left out."""
    return dict(_elements(case, stage, case.fine_tuning))


@lru_cache(maxsize=256)
def _elements(case: Case, stage: int, tuning: FineTuningConfig) -> Elements:
    """Elements of a rank's parameters by kind: of the model's, or of its adapters where there are any."""
    out = {"plain": 0, "partial": 0, "shared": 0, "tied": 0, "experts": 0}
    for start, stop in weight_ranges(case, stage):
        for kind, count in _layers(case.model, start, stop, _Split.of(case), tuning):
            out[kind] += count
    if tuning.enabled:
        return out
    for kind, count in _sorted(_ends(case, stage), _Split.of(case), case.padded_vocab):
        apart = case.grid.last_stage != 0
        out[kind if kind != "tied" or apart else "plain"] += count
    return out


def stage_elements(case: Case, stage: int) -> int:
    """Elements that a rank of ``stage`` holds, padding and the last stage's copy of a tied embedding included."""
    frozen = sum(_elements(case, stage, NO_ADAPTERS).values()) if case.fine_tuning.enabled else 0
    return frozen + trained_elements(case, stage)


def trained_elements(case: Case, stage: int) -> int:
    """Return how many of a rank's elements have gradients, masters and state."""
    return sum(bucket_elements(case, stage).values())


def expert_elements(case: Case, stage: int, *, trained: bool = True) -> int:
    """Return how many of a rank's elements are of experts: trained ones (all or none), or those that it holds."""
    if not case.model.moe.enabled:
        return 0
    return _elements(case, stage, case.fine_tuning if trained else NO_ADAPTERS)["experts"]


def unit_elements(
    case: Case, stage: int, *, trained: bool = False, experts: bool | None = None
) -> tuple[list[list[int]], int]:
    """Elements of each parameter of a rank, or of each that is ``trained``, unit by unit (layers, modules that predict
    further tokens, embedding, head), and those of tables that are in no unit: tied ones and what several units read.
    ``experts``: of experts alone, or of all but those."""
    spec, tuning = model_spec(case.model), case.fine_tuning
    ranges = case.of_stage(case.layer_ranges, stage)
    split = _Split.of(case)
    units = [
        [elements for kind, elements in _unit(case.model, i, split, tuning, trained)
         if experts is None or (kind == "experts") == experts]
        for start, stop in ranges for i in range(start, stop)
    ]
    shared: dict[str, int] = {}
    if case.model.shared_layers > 1:  # in buckets of their own, as tables are
        shared = {f"layers.{i}": sum(_elements_of(case, i)) for i, _ in weight_ranges(case, stage)}
        units = [[] for _ in units]
    if trained and tuning.enabled:
        return units, 0
    head, ends = spec.head, [spec.embedding.parameters] if stage == 0 else []
    if stage == case.grid.last_stage:
        ends = [*(part.parameters for part in head.predictions), *ends, (*head.shared, *head.norm.parameters)]
    late = {p.name for p in head.shared} if head.predictions else set()
    for end in ends:
        units.append([])
        for parameter in end:
            of_experts = parameter.split is not None and parameter.split.experts
            if experts is not None and of_experts != experts:
                continue
            local = parameter.local_numel(case.tp, case.padded_vocab, split.ep)
            if parameter.tied or parameter.name in late:
                shared[parameter.name] = local
            else:
                units[-1].append(local)
    return [unit for unit in units if unit or experts is not None or case.model.shared_layers > 1], sum(shared.values())


def _elements_of(case: Case, layer: int) -> list[int]:
    """Elements of each parameter of a layer on a rank."""
    return [elements for _, elements in _unit(case.model, layer, _Split.of(case), NO_ADAPTERS, False)]


def bucket_units(case: Case, stage: int) -> list[list[int]]:
    """Trained elements of each parameter of a rank by unit, as buckets take them: experts of which there are fewer
    copies than of the rest are apart, and those that no other rank holds are left out. A tied table is left out too."""
    if case.expert_replicas == case.dp * case.cp or not case.model.moe.enabled:
        return unit_elements(case, stage, trained=True)[0]
    units = unit_elements(case, stage, trained=True, experts=False)[0]
    if case.expert_shards > 1:
        units += unit_elements(case, stage, trained=True, experts=True)[0]
    return [unit for unit in units if unit]


def gathered_elements(case: Case, stage: int, *, experts: bool | None = None) -> float:
    """Elements that a rank of ``stage`` gathers from the other replicas in a step, padding of buckets left out.
    ``experts``: of experts alone, or of all but those.

    Under ZeRO-3 with reshard "forward" every pass gathers the layers whose weights are not in one of the two windows:
    where passes turn round the last two are, and with two layers or fewer always. Exact for 1F1B and GPipe with one
    chunk a stage; under other schedules nothing is counted as left in the windows.
    """
    if case.weight_gathers == 1:
        apart = expert_elements(case, stage, trained=case.zero_stage != 3)
        if experts:
            return apart
        whole = stage_elements(case, stage) if case.zero_stage == 3 else trained_elements(case, stage)
        return whole if experts is None else whole - apart
    units, table = unit_elements(case, stage, experts=experts)
    count, m = _gathered_layers(case, stage), case.micro_batches
    layers, ends = [sum(unit) for unit in units[:count]], sum(map(sum, units[count:]))
    down = up = 0  # turns from forward to backward passes, where the last two layers are there, and back
    if case.vp == 1 and case.schedule == "1f1b":
        down = max(m - (case.pp - 1 - stage), 1)
        up = down - 1
    elif case.vp == 1 and case.schedule == "gpipe":
        down = 1
    kept = down * sum(layers[-2:]) + up * sum(layers[:2])
    passes = sum(layers) if count <= 2 and case.vp == 1 else 2 * m * sum(layers) - kept
    # Embedding and head share a window: on one stage each forward pass needs both again. A table has its own.
    return passes + ends * (m if case.grid.last_stage == 0 else 1) + table


def _gathered_layers(case: Case, stage: int) -> int:
    """Units that take turns in the windows of layers: these, and the modules that predict further tokens."""
    return case.stage_layers(stage) + (case.model.mtp_layers if stage == case.grid.last_stage else 0)


@lru_cache(maxsize=4096)
def _unit(
    model: ModelConfig, index: int, split: _Split, tuning: FineTuningConfig, trained: bool
) -> tuple[tuple[str, int], ...]:
    """(kind, elements) of each parameter of a layer on a rank."""
    layer = model_spec(model).layers[index]
    parameters = [p for spec in layer_adapters(layer, tuning) for p in spec.parameters]
    if not (trained and tuning.enabled):
        parameters += layer.parameters
    return tuple(_sorted(parameters, split, 0))


def window_elements(case: Case, stage: int) -> int:
    """Elements of the windows in which ZeRO-3 gathers weights (``memory.zero3``): two layers, the larger of
    embedding and head, and a tied table."""
    whole = case.model.moe.enabled and case.expert_shards == 1  # experts that no other rank of a shard group holds
    units, table = unit_elements(case, stage, experts=False if whole else None)
    count = _gathered_layers(case, stage)
    layers, ends = ([sum(unit) for unit in part] for part in (units[:count], units[count:]))
    return case.engine.window(case, stage, sum(sorted(layers)[-2:]) + max(ends, default=0) + table)


def _ends(case: Case, stage: int) -> list[ParameterSpec]:
    """Parameters of the embedding and of the head where they are on this stage; a table that both use once."""
    spec = model_spec(case.model)
    out = list(spec.embedding.parameters) if stage == 0 else []
    if stage == case.grid.last_stage:
        out += [p for p in spec.head.parameters if not (p.tied and stage == 0)]
    return out


@lru_cache(maxsize=4096)
def _layers(
    model: ModelConfig, start: int, stop: int, split: _Split, tuning: FineTuningConfig
) -> tuple[tuple[str, int], ...]:
    """(kind, elements) of layers [start, stop) on a rank, or of their adapters where there are any."""
    def of(layer: LayerSpec) -> Iterable[ParameterSpec]:
        adapters = layer_adapters(layer, tuning)
        return [p for spec in adapters for p in spec.parameters] if tuning.enabled else layer.parameters

    return tuple(
        (kind, count * elements)
        for layer, count in model_spec(model).kinds(start, stop)
        for kind, elements in _sorted(of(layer), split, 0)
    )


def _sorted(parameters: Iterable[ParameterSpec], split: _Split, padded_vocab: int) -> list[tuple[str, int]]:
    """(kind, elements on a rank) of each parameter, or of its own and its shared rows."""
    out: list[tuple[str, int]] = []
    for parameter in parameters:
        local, shared = parameter.local_numel(split.tp, padded_vocab, split.ep), parameter.shared_numel(split.tp)
        if parameter.tied:
            out.append(("tied", local))
        elif parameter.split is not None and parameter.split.experts:
            out.append(("experts", local))
        elif parameter.split is None and parameter.is_partial(split.tp, split.sequence_parallel):
            out.append(("partial", local))
        else:
            out.append(("plain", local - shared))
            if shared:
                out.append(("shared", shared))
    return out
