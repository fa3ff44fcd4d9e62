"""The comparison with other trainers: what it proves before it times, and what its file holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from benchmarks.compare.__main__ import main
from benchmarks.compare.peer import Unable, build
from benchmarks.compare.results import quartiles, summary
from benchmarks.compare.run import PeerResult, Plan, differences, judge
from benchmarks.compare.sizes import Size, sizes
from benchmarks.compare.waits import host_reads
from benchmarks.compare.weights import batch
from benchmarks.compare.worker import numbers_of

CPU = torch.device("cpu")


def numbers(name: str, size: Size) -> dict[str, list[float]]:
    """What the worker answers to ``check``, without a process."""
    return numbers_of(build(name, size, CPU), size, [batch(size, i, CPU) for i in range(3)])


def test_this_project_and_plain_torch_compute_the_same() -> None:
    for name in ("tiny", "tiny-gpt2", "tiny-llama", "tiny-layers", "tiny-llama-layers"):
        size = sizes()[name]
        assert differences(size, numbers("ours-no-kernels", size), numbers("torch", size)) < 1.0, name


@pytest.mark.parametrize("name", ["tiny-layers", "tiny-llama-layers"])
def test_layers_of_transformers_compute_the_same(name: str) -> None:
    pytest.importorskip("transformers")
    size = sizes()[name]
    assert differences(size, numbers("hf-deepspeed", size), numbers("torch", size)) < 1.0


def test_layers_without_weight_gradients_are_refused() -> None:
    size = sizes()["tiny-layers"]
    whole = numbers("torch", size)
    peer = build("torch", size, CPU)
    peer.stack.layers[0].up.weight.requires_grad_(False)  # type: ignore[attr-defined]
    part = numbers_of(peer, size, [batch(size, 0, CPU)])
    assert part["probes"] == whole["probes"] and differences(size, part, whole) > 1.0


def test_a_step_brings_values_to_the_host_once_whatever_its_length() -> None:
    """What costs a wait on a GPU: none by layer or micro-batch, and all at one place, after the update."""
    found = []
    for layers, passes in ((2, 2), (4, 2), (2, 4)):
        tiny = sizes()["tiny"]
        size = replace(tiny, model=replace(tiny.model, num_layers=layers), global_batch=passes * tiny.micro_batch)
        made = build("ours", size, CPU)
        made.step(*batch(size, 0, CPU))
        found.append(host_reads(lambda made=made, size=size: made.step(*batch(size, 1, CPU))))  # type: ignore[misc]
    assert found[0] == found[1] == found[2] and len(found[0]) == 1, found
    (read,) = found[0]
    assert read.calls == 1 and read.where.startswith("megatron_port/core/engine/"), read


def test_reads_of_values_are_seen_where_they_are() -> None:
    x = torch.ones(3, requires_grad=True)

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return g if bool(g.sum() > 0) else -g

    def step() -> None:
        y = Reads.apply(x)
        y[y > 1].sum().backward()
        for _ in range(2):
            y.sum().item()

    seen = {(w.what, w.calls) for w in host_reads(step)}
    assert {("item", 2), ("index", 1), ("_local_scalar_dense", 1)} == seen, seen
    assert host_reads(lambda: x * 2 + torch.ones(3)) == []


def test_a_peer_that_computes_something_else_is_refused() -> None:
    size = sizes()["tiny"]
    # As near as two activations are.
    other: Literal["gelu", "gelu_tanh"] = "gelu_tanh" if size.model.activation == "gelu" else "gelu"
    wrong = replace(size, model=replace(size.model, activation=other))
    outcomes = [
        PeerResult("torch", numbers=numbers("torch", size)), PeerResult("ours", numbers=numbers("torch", wrong)),
    ]
    judge(size, outcomes)
    assert [o.state for o in outcomes] == ["counted", "refused"]
    assert "computes something else" in outcomes[1].reason
    alone = [PeerResult("ours", numbers=outcomes[0].numbers)]
    judge(size, alone)
    assert alone[0].state == "unproved"


def test_a_peer_without_such_a_model_says_so() -> None:
    try:
        build("torchtitan", sizes()["tiny"], CPU)
    except Unable as error:
        assert "no GPT" in str(error)
    else:
        raise AssertionError("built")


def test_8_bits_have_a_tolerance_and_a_comparison_of_their_own() -> None:
    size = sizes()["tiny-bf16"]
    reference = numbers("torch", size)
    outcomes = [PeerResult(name, numbers=numbers(name, size)) for name in ("ours-fp8", "ours-fp8-rowwise")]
    assert all(differences(size, o.numbers, reference) > 0.3 for o in outcomes)
    judge(size, [PeerResult("torch", numbers=reference), *outcomes])
    assert [o.state for o in outcomes] == ["counted"] * 2 and all(o.difference and o.difference < 1 for o in outcomes)
    assert build("ours-fp8", size, CPU).about.handicap == "a CPU multiplies 8-bit values in fp32"
    plan = Plan("cpu", 1)
    timed = [replace(outcomes[0], peer="ours", seconds=[2.0, 3.0], cpu_seconds=[2.0, 3.0]),
             replace(outcomes[0], seconds=[1.0, 1.0], cpu_seconds=[1.0, 1.0])]
    made = summary(size, timed, [], None, plan)
    assert made["fp8_over_ours"]["ours-fp8"]["median"] == 2.5 and "ours_over_fastest_peer" not in made
    try:
        build("ours-fp8", sizes()["tiny"], CPU)
    except Unable as error:
        assert 'needs precision.dtype "bf16", not "fp32"' in str(error)
    else:
        raise AssertionError("built")


def test_all_in_bf16_is_plain_torch_up_to_its_rounding() -> None:
    """The same model, decay groups, sums over micro-batches and clipping; it says what it leaves out."""
    size = sizes()["tiny-bf16"]
    narrow = numbers("torch-narrow", size)
    assert 0.02 < differences(size, narrow, numbers("torch", size), "narrow") < 1.0
    about = build("torch-narrow", size, CPU).about
    assert about.handicap == "no graphs on a CPU" and "no fp32 masters" in about.favour
    with pytest.raises(Unable, match="whole steps in bf16"):
        build("torch-narrow", sizes()["tiny"], CPU)


@pytest.mark.parametrize("name", ["experts-8", "experts-64"])
def test_a_layer_of_experts_has_the_tokens_of_a_step(name: str) -> None:
    size = sizes()[name]
    assert size.tokens == 8192 and size.model.num_layers == 1 and str(size.model.moe.num_experts) in name


def test_a_layer_of_experts_is_built_by_this_project() -> None:
    size = sizes()["tiny-experts"]
    made = build("ours", size, CPU)
    out, dx = made.step(*batch(size, 0, CPU))
    assert made.about.settings["experts"] and out.shape == dx.shape and bool(dx.isfinite().all())


def test_flops_of_a_rank_are_a_share_of_the_layers() -> None:
    found = sizes()
    whole = 96 * 2048 * 12288**2 * (1 + 2048 / (6 * 12288))  # forward and backward of 96 layers, 72·s·h²·… a layer
    part = found["175b-layers-s2048"]
    assert abs(part.flops / part.global_batch / (72 * whole / 96 / 8) - 1) < 1e-9
    assert quartiles([3.0, 1.0, 2.0])["median"] == 2.0


def test_what_does_not_fit_is_run_with_fewer_layers() -> None:
    size = sizes()["6.7b"]
    assert size.layers_in(150_000_000_000) == 32 and sizes()["gpt2-xl"].layers_in(64_000_000_000) == 48
    fewer = size.layers_in(64_000_000_000)
    assert 10 < fewer < 16
    assert replace(size, model=replace(size.model, num_layers=fewer)).step_bytes <= 0.95 * 64_000_000_000


@pytest.mark.slow
def test_one_command_writes_the_table(tmp_path: Path) -> None:
    out = tmp_path / "made.json"
    command = ["--sizes", "tiny", "--peers", "ours-no-kernels", "torch", "--repetitions", "1", "--steps", "1",
               "--warm-up", "0", "--device", "cpu", "--out", str(out)]
    assert main(command) == 0
    made = json.loads(out.read_text())
    assert made["hardware"]["threads"] == 1 and made["command"]
    (size,) = made["sizes"]
    assert size["model_flops_per_step"] == sizes()["tiny"].flops and size["tokens_per_step"] == 128
    assert size["ours_over_fastest_peer"]["peer"] == "torch"
    for row in size["peers"]:
        assert row["state"] == "counted" and row["difference_over_tolerance"] < 1.0
        assert row["seconds"]["median"] > 0 and row["peak_memory_bytes"] > 0
        assert abs(row["model_tflops"] * 1e12 * row["seconds"]["median"] / size["model_flops_per_step"] - 1) < 1e-9
        assert abs(row["losses"][0] - 6.0045) < 1e-3
