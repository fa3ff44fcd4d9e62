"""GeLU in a product's epilogue: what is decided from the times, and how cublasLt is called."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.epilogues import CASES, Algorithm, Case, CublasLt, Heuristic, Passes, Row, decision, error_of

GHOST = Path(__file__).resolve().parents[1] / "ghost"
CUDA_HEADER = """#pragma once
struct dim3 { unsigned x, y, z; };
typedef int cudaError_t;
"""
REST = """#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include "events.h"
#include "graphs.h"
#include "compute.h"
GhostMemory& GhostMemory::add(char, const void*, size_t) { return *this; }
void ghost_touch(const char*, const void*, const std::string&, const char*, ...) {}
void* ghost_handle() { return malloc(1); }
bool ghost_computes() { return true; }
void ghost_stop(const char* format, ...) {
  va_list rest; va_start(rest, format); vfprintf(stderr, format, rest); va_end(rest); abort();
}
void ghost_do(const void*, std::function<void()> action) { action(); }
"""
"""What the ghost machine's cublasLt needs of the rest of it, on the host's memory."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CublasLt:
    """The ghost machine's cublasLt, compiled by itself."""
    folder = tmp_path_factory.mktemp("cublaslt")
    (folder / "cuda_runtime_api.h").write_text(CUDA_HEADER)
    (folder / "rest.cpp").write_text(REST)
    sources = [str(GHOST / "cublaslt.cpp"), str(GHOST / "products.cpp"), str(folder / "rest.cpp")]
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", "-std=c++17", f"-I{folder}", f"-I{GHOST}", *sources, "-o",
                    str(folder / "lib.so")], check=True)
    return CublasLt(ctypes.CDLL(str(folder / "lib.so")), 1, torch.device("cpu"), lambda: 0)


@pytest.mark.parametrize("kind", ["product", "forward", "backward"])
def test_each_algorithm_gives_the_pass_in_fp64(library: CublasLt, kind: str) -> None:
    """The structures, codes, orders and leading dimensions are those that cublasLt reads; the algorithm that is handed
    back must be one that the heuristic named."""
    passes = Passes(Case("x", rows=24, wide=40, hidden=16, pairs=1, expected_ms=1.0), torch.device("cpu"))
    torch.manual_seed(0)
    passes.before.copy_(torch.randn(24, 40))
    exact = passes.exact(kind)
    algorithms = passes.fused(library, kind)
    assert len(algorithms) == 8
    for call in (algorithms[0], algorithms[7]):
        passes.out.fill_(float("nan"))
        call(0)
        found = (passes.out, passes.bias_gradient) if kind == "backward" else (passes.out,)
        assert error_of(found, exact) < 2e-2
    if kind == "forward":  # what GeLU was given is kept, for the backward pass
        assert error_of([passes.before], [passes.x.double() @ passes.up.double().t() + passes.bias.double()]) < 2e-2


def test_structures_have_the_sizes_of_the_header() -> None:
    assert ctypes.sizeof(Algorithm) == 64 and ctypes.sizeof(Heuristic) == 96
    assert [getattr(Heuristic, name).offset for name in ("workspace", "state", "waves", "reserved")] == [64, 72, 76, 80]


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
