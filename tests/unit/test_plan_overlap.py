"""How many parts tensor-parallel products have where a run leaves that open: by the planner, with a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_port.core.config.checks import check
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import RunConfig
from megatron_port.tools.plan import overlap
from megatron_port.tools.plan.activation_plan import with_activation_plan
from megatron_port.tools.plan.case import Machine, case_of
from megatron_port.tools.plan.memory import exchange_bytes, stage_memory
from megatron_port.tools.plan.overlap import with_tensor_chunks
from megatron_port.tools.plan.step import chunk_costs, plan_step

RUNS = Path(__file__).resolve().parents[2] / "configs" / "runs"


def shipped(name: str, **changes: object) -> RunConfig:
    config: RunConfig = with_values(load(RUNS / f"{name}.toml").config, changes)
    return config


def seconds(config: RunConfig, parts: int, share: float) -> float:
    """Planned seconds of a step whose products have ``parts`` parts, of which ``share`` is hidden."""
    case, _ = case_of(config)
    calibration = replace(config.calibration, overlap_share=share)
    machine = Machine(cluster=config.cluster, hardware=config.hardware, calibration=calibration)
    return plan_step(replace(case, tensor_chunks=parts), machine, quick=True).seconds


def test_parts_are_taken_where_half_of_what_they_hide_pays() -> None:
    config = shipped("frontier-1.4b")
    found, why = with_tensor_chunks(config)
    times = {parts: seconds(config, parts, 0.5) for parts in (1, 2, 4, 8)}
    assert found.layout.tp_overlap_chunks == min(times, key=times.__getitem__) == 2
    assert why == (
        f"tensor-parallel products in 2 parts: a step in 2 is planned {1 - times[2] / times[1]:.1%} shorter, "
        "with 50% of a collective hidden behind products on frontier"
    )
    assert with_activation_plan(config).layout.tp_overlap_chunks == 2
    check(found)


def test_a_gain_only_where_all_is_hidden_is_not_believed() -> None:
    config = shipped("perlmutter-175b")
    assert seconds(config, 2, 1.0) < seconds(config, 1, 1.0)
    found, why = with_tensor_chunks(config)
    assert found.layout.tp_overlap_chunks == 1 and "; 1% is asked for" in why


def test_a_measured_share_is_taken_as_it_is() -> None:
    config = shipped("frontier-1.4b", **{"calibration.overlap_share": 0.1})
    found, why = with_tensor_chunks(config)
    assert found.layout.tp_overlap_chunks == 1 and "longer, with 10% of a collective hidden" in why


def test_what_is_stated_stays() -> None:
    for parts in (1, 4):
        config = shipped("frontier-1.4b", **{"layout.tp_overlap_chunks": parts})
        assert with_tensor_chunks(config) == (config, "")
    alone = shipped("frontier-1.4b", **{"layout.tensor_parallel_size": 1})
    assert with_tensor_chunks(alone) == (alone, "")


@pytest.mark.parametrize(("changes", "says"), [
    ({"backend.device": "cpu"}, "on a CPU nothing runs beside them"),
    ({"hardware.matmul_tflops": 0.0, "hardware.device": ""}, "says too little to plan"),
    ({"precision.fp8": "tensorwise", "hardware.fp8_matmul_tflops": 200.0}, "none of 2, 4, 8 is legal"),
    ({"fine_tuning.method": "lora", "fine_tuning.rank": 8}, "adapters have no parts"),
])
def test_where_nothing_runs_beside_a_product_there_is_one_part(changes: dict[str, object], says: str) -> None:
    config, why = with_tensor_chunks(shipped("frontier-1.4b", **changes))
    assert config.layout.tp_overlap_chunks == 1 and says in why


def test_parts_divide_the_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "LEAST_GAIN", -1.0)
    config, _ = with_tensor_chunks(shipped("frontier-1.4b", **{"model.seq_length": 2052}))
    assert 2052 % config.layout.tp_overlap_chunks == 0 and config.layout.tp_overlap_chunks > 1


def test_pairs_of_ranks_are_planned_with_their_time_and_buffers() -> None:
    sizes = {"layout.sequence_parallel": True, "engine": "native"}
    plain, pairs = (
        shipped("frontier-1.4b", **sizes, **{"layout.tp_exchange": name}) for name in ("collective", "pairs")
    )
    (one, _), (other, _) = case_of(plain), case_of(pairs)
    machine = Machine(cluster=plain.cluster, hardware=plain.hardware, calibration=plain.calibration)
    exposed = [sum(c.forward_tensor for c in chunk_costs(case, machine)) for case in (one, other)]
    assert exposed[1] < 0.5 * exposed[0]
    held = [stage_memory(case, machine, 0).buffers for case in (one, other)]
    product = one.micro_batch * 2048 * one.model.hidden_size * 2
    assert held[1] - held[0] == pytest.approx(product * (one.tp - 1) / one.tp)
    assert with_tensor_chunks(pairs)[0].layout.tp_overlap_chunks == 1


def test_a_case_without_sequence_parallelism_exchanges_nothing() -> None:
    case, _ = case_of(shipped("frontier-1.4b", engine="native"))
    assert case.engine.tensor_overlap == "backward" and exchange_bytes(case) == 0.0
