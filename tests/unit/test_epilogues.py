"""GeLU in a product's epilogue: what is decided from the times, and how cublasLt is called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from ghost_cublaslt import compiled_cublaslt

from benchmarks.epilogues import CASES, Case, Passes, Row, decision, error_of
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels import lt_products as products


@pytest.fixture(scope="module", autouse=True)
def _library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The ghost machine's cublasLt, for tensors of a CPU."""
    kernels.load("cpu")
    assert products.open_library(products.CPU, compiled_cublaslt(tmp_path_factory.mktemp("cublaslt"))) == ""
    yield
    products.close_library(products.CPU)


@pytest.mark.parametrize("kind", ["product", "forward", "backward"])
def test_each_algorithm_gives_the_pass_in_fp64(kind: str) -> None:
    """Each pass gives cublasLt its operands, layouts, epilogue, bias and aux."""
    passes = Passes(Case("x", rows=24, wide=40, hidden=16, pairs=1, expected_ms=1.0), torch.device("cpu"))
    torch.manual_seed(0)
    passes.before.copy_(torch.randn(24, 40))
    exact = passes.exact(kind)
    algorithms = passes.fused(kind)
    assert len(algorithms) == 8
    for call in (algorithms[0], algorithms[7]):
        passes.out.fill_(float("nan"))
        call(0)
        found = (passes.out, passes.bias_gradient) if kind == "backward" else (passes.out,)
        assert error_of(found, exact) < 2e-2
    if kind == "forward":  # what GeLU was given is kept, for the backward pass
        assert error_of([passes.before], [passes.x.double() @ passes.up.double().t() + passes.bias.double()]) < 2e-2


def rows(forward_us: float, backward_us: float, error: float = 1e-3) -> list[Row]:
    """Rows of both cases in which the fused passes are so much faster than the own ones."""
    return [Row(case.name, kind, own_s=1e-3, fused_s=[2e-3, 1e-3 - gain * 1e-6], own_error=1e-3, fused_error=error)
            for case in CASES
            for kind, gain in (("product", 500.0), ("forward", forward_us), ("backward", backward_us))]


def test_go_means_two_thirds_of_what_was_expected_at_every_shape() -> None:
    made = decision(CASES, rows(20.0, 20.0))
    xl, large = made["cases"].values()
    assert made["go"] and xl["saved_ms"] == pytest.approx(24 * 0.04) and large["saved_ms"] == pytest.approx(512 * 0.04)
    assert xl["passes"] == ["forward", "backward"]
    made = decision(CASES, rows(19.0, 19.0))  # 24 x 38 us is under 0.933 ms, 512 x 38 us over 19.3
    assert not made["go"] and [found["go"] for found in made["cases"].values()] == [False, True]


def test_a_slower_pass_is_left_out_and_costs_nothing() -> None:
    made = decision(CASES, rows(40.0, -300.0))
    assert made["go"] and all(found["passes"] == ["forward"] for found in made["cases"].values())


def test_no_pass_counts_that_errs_too_much_or_has_no_algorithm() -> None:
    assert not decision(CASES, rows(500.0, 500.0, error=2.1e-3))["go"]
    assert decision(CASES, rows(500.0, 500.0, error=2e-3))["go"]
    assert not decision(CASES, [replace(row, fused_s=[], failed="no algorithm") for row in rows(500.0, 500.0)])["go"]
    assert not decision(CASES, [])["go"]
