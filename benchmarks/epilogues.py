"""GeLU inside of the product before it, by cublasLt's epilogues, against the product and the own kernel: go or no-go.

    python benchmarks/epilogues.py --json epilogues.json
    python benchmarks/epilogues.py --tiny                # shapes for the ghost machine, whose times say nothing

cublasLt is the library that torch has loaded, by the own product op. *forward*: product, bias and GeLU, with what
GeLU was given kept (GELU_AUX_BIAS), against torch's product and the own bias + GeLU. *backward*: product, gradient
through GeLU and the bias's gradient (DGELU_BGRAD), against torch's product and the own gradient. *product*: without an
epilogue, against torch's. Of each up to eight algorithms that the library's heuristic names; the fastest counts.

An epilogue is worth its code where what it saves of a step is at least two thirds of what the model of the step
expects, at every shape, and its error against fp64 is no more than twice the own kernels'. The file is written after
each row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.compare.clocks import ClockLog, clock_log
from benchmarks.compare.results import hardware
from benchmarks.device_clock import time_calls
from megatron_port.core.io.files import write_text
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels import lt_products as products
from megatron_port.ext.kernels.lt_products import Epilogue
from megatron_port.ext.kernels.ops import activation

LEAST_SHARE, MOST_ERROR = 2 / 3, 2.0


@dataclass(frozen=True)
class Case:
    """A layer's MLP: ``rows`` of a micro-batch, ``wide`` and ``hidden`` features."""

    name: str
    rows: int
    wide: int
    hidden: int
    pairs: int
    """Of a forward and a backward pass in a step: layers times micro-batches."""
    expected_ms: float
    """What a step would save by the model of it (calibrated on a profile of an H200)."""


CASES = (Case("gpt2-xl, 12 layers, 2 micro-batches", 8192, 6400, 1600, 24, 1.4),
         Case("6.7b, 32 layers, 16 micro-batches", 4096, 16384, 4096, 512, 29.0))
TINY = (Case("tiny", 32, 64, 16, 4, 1.0),)


@dataclass
class Row:
    """One pass of a case; seconds on the device. ``fused_s``: by algorithm, in the heuristic's order."""

    case: str
    kind: str
    own_s: float = 0.0
    fused_s: list[float] = field(default_factory=list)
    own_error: float = 0.0
    fused_error: float = 0.0
    clocks: dict[str, Any] = field(default_factory=dict)
    failed: str = ""


def decision(cases: Sequence[Case], rows: Sequence[Row]) -> dict[str, Any]:
    """Return ``go``, and for each case the milliseconds of a step that its faster passes save and what was expected.

    A pass that is slower than the own one is not taken and costs nothing; one whose error is too large, or that has no
    algorithm, saves nothing.
    """
    made: dict[str, Any] = {"cases": {}}
    for case in cases:
        saved, taken = 0.0, []
        for row in rows:
            right = row.fused_error <= MOST_ERROR * row.own_error
            if row.case != case.name or row.kind == "product" or not row.fused_s or not right:
                continue
            if (gain := row.own_s - min(row.fused_s)) > 0:
                saved += 1e3 * case.pairs * gain
                taken.append(row.kind)
        made["cases"][case.name] = {"saved_ms": saved, "expected_ms": case.expected_ms, "passes": taken,
                                    "go": saved >= LEAST_SHARE * case.expected_ms}
    made["go"] = bool(cases) and all(found["go"] for found in made["cases"].values())
    return made


def gelu_slope(x: Tensor) -> Tensor:
    """Derivative of GeLU's tanh form, in x's dtype."""
    wide = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(torch.nn.functional.gelu(wide, approximate="tanh").sum(), wide)
    return slope


class Passes:
    """The operands of a case, its passes by the own kernels and by cublasLt, and their exact results."""

    def __init__(self, case: Case, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(1)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(*shape, generator=generator, device=device)).bfloat16()

        self.case, scale = case, case.hidden**-0.5
        self.x, self.dy = random(case.rows, case.hidden), random(case.rows, case.hidden)
        self.up, self.down = random(case.wide, case.hidden, scale=scale), random(case.hidden, case.wide, scale=scale)
        self.bias = random(case.wide, scale=0.1)
        self.out = torch.empty(case.rows, case.wide, dtype=torch.bfloat16, device=device)
        self.before = torch.empty_like(self.out)
        self.bias_gradient = torch.empty_like(self.bias)

    def product(self) -> Tensor:
        """Of the MLP's first linear, without its bias."""
        return torch.mm(self.x, self.up.t())

    def forward(self) -> tuple[Tensor, ...]:
        """By torch's product and the own kernel."""
        return (activation.bias_gelu(self.product(), self.bias, approximate=True),)

    def backward(self) -> tuple[Tensor, ...]:
        """By torch's product and the own kernel; ``before`` holds what GeLU was given, without its bias."""
        gradient = torch.mm(self.dy, self.down)
        made: tuple[Tensor, ...] = torch.ops.megatron_port.bias_gelu_backward.default(
            gradient, self.before, self.bias, True, True)
        return made[:2]

    def fused(self, kind: str) -> list[Callable[[int], None]]:
        """The algorithms of a pass, in the order of the open library's heuristic."""
        left, right, more = self.x, self.up.t(), dict[str, Any]()
        if kind == "forward":
            more = {"epilogue": Epilogue.GELU_AUX_BIAS, "vector": self.bias, "aux": self.before}
        elif kind == "backward":
            left, right = self.dy, self.down
            more = {"epilogue": Epilogue.DGELU_BGRAD, "vector": self.bias_gradient, "aux": self.before}

        def run(candidate: int, _: int) -> None:
            products.product(left, right, self.out, candidate=candidate, **more)

        return [partial(run, i) for i in range(products.candidates(left, right, self.out, **more))]

    def exact(self, kind: str) -> tuple[Tensor, ...]:
        """In fp64. Backward: of what GeLU was given as ``before`` has it, rounded to bf16."""
        if kind != "backward":
            wide = self.x.double() @ self.up.double().t()
            return (wide if kind == "product" else torch.nn.functional.gelu(wide + self.bias.double(),
                                                                           approximate="tanh"),)
        gradient = (self.dy.double() @ self.down.double()) * gelu_slope(self.before.double())
        return gradient, gradient.sum(0)


def error_of(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Largest difference over the exact result's rms, of all results."""
    return max(float((a.double() - b).abs().max() / b.square().mean().sqrt()) for a, b in zip(found, exact))


def measure(passes: Passes, kind: str, device: torch.device, clocks: ClockLog) -> Row:
    """Check and time a pass."""
    row = Row(passes.case.name, kind)
    try:
        algorithms = passes.fused(kind)
        if not algorithms:
            raise RuntimeError("the heuristic names no algorithm")
        own: Callable[[], Any] = {"product": lambda: (passes.product(),), "forward": passes.forward,
                                  "backward": passes.backward}[kind]
        passes.before.copy_(passes.product())
        exact, bias = passes.exact(kind), passes.bias
        if kind == "backward":  # the own kernel adds the bias, cublasLt was given the sum
            passes.bias = torch.zeros_like(bias)
        row.own_error = error_of(own(), exact)
        passes.bias = bias
        algorithms[0](0)
        results = (passes.out, passes.bias_gradient) if kind == "backward" else (passes.out,)
        row.fused_error = error_of(results, exact)
        functions = {"own": lambda i: own(), **{str(i): call for i, call in enumerate(algorithms)}}
        timings, row.clocks = clocks.timed(lambda: time_calls(functions, device, calls=8, repeats=5))
        row.own_s = timings["own"].device_s
        row.fused_s = [timings[str(i)].device_s for i in range(len(algorithms))]
    except RuntimeError as error:
        row.failed = str(error)[:300]
    return row


def main(argv: list[str] | None = None) -> int:
    """Measure, decide, print, write. 1: a pass could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="written after each row")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.version.hip:
        print("no GPU that torch and cublasLt can use", file=sys.stderr)
        return 3
    device = torch.device("cuda", 0)
    kernels.load("cuda")
    if problem := products.open_library():
        print(problem, file=sys.stderr)
        return 3
    cases, rows = TINY if args.tiny else CASES, list[Row]()
    made = {"command": " ".join(["benchmarks/epilogues.py", *(sys.argv[1:] if argv is None else argv)]),
            "hardware": hardware("cuda", 1), "rows": rows, "decision": {}}
    with clock_log("cuda") as clocks:
        for case in cases:
            passes = Passes(case, device)
            for kind in ("product", "forward", "backward"):
                row = measure(passes, kind, device, clocks)
                rows.append(row)
                made["decision"] = decision(cases, rows)
                if args.json:
                    write_text(args.json, json.dumps({**made, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
                best = f"{min(row.fused_s) * 1e3:.3f} ms, best of {len(row.fused_s)}" if row.fused_s else row.failed
                print(f"{case.name:<38}{kind:<10}own {row.own_s * 1e3:.3f} ms; cublasLt {best}; errors "
                      f"{row.own_error:.2e} and {row.fused_error:.2e}", flush=True)
    print(json.dumps(made["decision"]))
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
