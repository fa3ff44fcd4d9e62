"""Own kernels on a CPU against torch's, in one run: python benchmarks/cpu_kernels.py [--threads 2] [--json] [NAME ...]

A case builds what both sides need and returns them as two functions. They run in turn, so that what else the machine
does strikes both; the ratio is that of the least times, which other programs disturb least. ``make kernels`` must have
run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F

from megatron_port.core.dist.positions import Positions
from megatron_port.core.layers import fused
from megatron_port.core.layers.attention import math_attention_with
from megatron_port.core.layers.cross_entropy import vocab_parallel_cross_entropy
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.ops import activation, attention, norm, optimizer
from megatron_port.ext.kernels.ops.softmax import causal_softmax, own_cross_entropy
from megatron_port.ext.kernels.torch_attention import sdpa_attention

Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """``make`` returns one step of the own kernels and one of torch's; ``shape`` is for the reader."""

    name: str
    shape: str
    make: Callable[[], tuple[Step, Step]]
    wanted: float | None = None
    """Least ratio torch ÷ own that the project asks for."""


@dataclass(frozen=True)
class Row:
    """What was measured of a case."""

    name: str
    shape: str
    own_ms: float
    torch_ms: float
    ratio: float
    wanted: float | None


def cross_entropy(rows: int, cols: int, dtype: torch.dtype) -> tuple[Step, Step]:
    """Loss and gradient of the logits. The own step works on what the last one left: its logits are overwritten."""
    logits = torch.randn(rows, cols).to(dtype)
    labels = torch.randint(0, cols, (rows,))
    spent = logits.clone()
    x = logits.clone().requires_grad_()

    def own() -> None:
        leaf = spent.detach().requires_grad_()
        loss = vocab_parallel_cross_entropy(
            leaf, labels, offset=0, extent=cols, group=None, ops=own_cross_entropy
        )
        loss.mean().backward()

    def plain() -> None:
        x.grad = None
        F.cross_entropy(x, labels).backward()

    return own, plain


SIZES = [1 << 20] * 18 + [200_003] * 6 + [4096] * 6
"""20 M elements in 30 tensors, large, odd and small."""


def adamw(weight_dtype: torch.dtype | None) -> tuple[Step, Step]:
    """An update of fp32 masters, and of weights rounded from them where there are any; torch's default AdamW."""
    masters = [torch.randn(n) for n in SIZES]
    grads = [torch.randn(n) for n in SIZES]
    exp_avg, exp_avg_sq = ([torch.zeros(n) for n in SIZES] for _ in range(2))
    weights = [] if weight_dtype is None else [m.to(weight_dtype) for m in masters]
    theirs, their_weights = [m.clone() for m in masters], [w.clone() for w in weights]
    for p, g in zip(theirs, grads):
        p.grad = g
    plain_adamw = torch.optim.AdamW(theirs, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    step = torch.zeros((), dtype=torch.int64)

    def own() -> None:
        step.add_(1)
        optimizer.adamw_(weights, masters, grads, exp_avg, exp_avg_sq, step=step, grad_scale=None, skip=None, lr=1e-4,
                         beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)

    def plain() -> None:
        plain_adamw.step()
        for w, p in zip(their_weights, theirs):
            w.copy_(p)

    return own, plain


def square_norm(dtype: torch.dtype) -> tuple[Step, Step]:
    """Squared norm of gradients."""
    grads = [torch.randn(n).to(dtype) for n in SIZES]

    def own() -> None:
        optimizer.square_norm(grads)

    def plain() -> None:
        torch.stack(torch._foreach_norm(grads)).double().square().sum()

    return own, plain


def forward_backward(
    own: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> tuple[Step, Step]:
    """One pass forward and back through both, on tensors of these shapes."""
    inputs = [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]

    def step(function: Callable[..., torch.Tensor]) -> Step:
        def run() -> None:
            out = function(*inputs)
            torch.autograd.grad(out, inputs, out.detach())

        return run

    return step(own), step(plain)


def dropout_attention(seq: int, heads: int, size: int, dtype: torch.dtype, *, fused: bool) -> tuple[Step, Step]:
    """Attention with dropout of the probabilities: own, or math with dropout inside the own softmax; the other side is
    math with the own softmax and dropout by torch's ops after it. One sample, as many key as query heads."""
    stream = DropoutStream(1, torch.device("cpu"))
    stream.set_micro_batch(0, (0,))
    dropout = stream.probability_dropout(0.1, op="a", head_offset=0, positions=Positions.contiguous(seq))
    in_softmax = math_attention_with(causal_softmax)
    after = math_attention_with(lambda scores, *, scale, dropout: dropout.drop(causal_softmax(scores, scale=scale)))

    def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention.attention(q, k, v, dropout=dropout) if fused else in_softmax(q, k, v, dropout=dropout)

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return after(q, k, v, dropout=dropout)

    return forward_backward(own, plain, *[(seq, 1, heads, size)] * 3, dtype=dtype)


def elementwise(dtype: torch.dtype) -> list[Case]:
    """The ops that move memory, in one dtype: the quick start's hidden size, and one as of a real model."""
    def case(
        name: str, shape: str, own: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor],
        *shapes: tuple[int, ...],
    ) -> Case:
        label = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        return Case(f"{name} {label}", shape, lambda: forward_backward(own, plain, *shapes, dtype=dtype))

    found = []
    for rows, cols in ((4096, 128), (2048, 1024)):
        shape, tall = f"{rows} x {cols}", (rows, cols)
        found += [
            case("rms_norm", shape, lambda x, w: norm.rms_norm(x, w, 1e-5),
                 lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), tall, (cols,)),
            case("layer_norm", shape, lambda x, w, b: norm.layer_norm(x, w, b, 1e-5),
                 lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5), tall, (cols,), (cols,)),
            case("swiglu", shape, activation.swiglu, fused.torch_swiglu, (rows, 2 * cols)),
        ]
        for word, tanh in (("tanh", True), ("erf", False)):
            found.append(case(f"bias_gelu {word}", shape, partial(activation.bias_gelu, approximate=tanh),
                              partial(fused.torch_bias_gelu, approximate=tanh), tall, (cols,)))
    found.append(case("softmax", "1 x 4 x 512 x 512", partial(causal_softmax, scale=1.0),
                      partial(fused.torch_causal_softmax, scale=1.0), (1, 4, 512, 512)))
    return found


CASES = [
    Case("cross_entropy fp32", "512 x 50304", lambda: cross_entropy(512, 50304, torch.float32), 1.5),
    Case("cross_entropy bf16", "512 x 50304", lambda: cross_entropy(512, 50304, torch.bfloat16)),
    Case("adamw fp32", "20 M in 30", lambda: adamw(None), 1.5),
    Case("adamw bf16 weights", "20 M in 30", lambda: adamw(torch.bfloat16), 1.5),
    Case("square_norm fp32", "20 M in 30", lambda: square_norm(torch.float32)),
    Case("square_norm bf16", "20 M in 30", lambda: square_norm(torch.bfloat16)),
    *(case for dtype in (torch.float32, torch.bfloat16, torch.float16) for case in elementwise(dtype)),
    Case("attention fp32", "128 x 8, 4 of 32", lambda: forward_backward(
        attention.attention, sdpa_attention(), *[(128, 8, 4, 32)] * 3)),
    Case("attention bf16", "1024 x 1, 8 of 64", lambda: forward_backward(
        attention.attention, sdpa_attention(), *[(1024, 1, 8, 64)] * 3, dtype=torch.bfloat16)),
    Case("attention fp32", "1024 x 1, 8 of 64", lambda: forward_backward(
        attention.attention, sdpa_attention(), *[(1024, 1, 8, 64)] * 3)),
    Case("dropout attention fp32", "1024 x 1, 12 of 64",
         lambda: dropout_attention(1024, 12, 64, torch.float32, fused=True), 5.0),
    Case("dropout attention bf16", "1024 x 1, 12 of 64",
         lambda: dropout_attention(1024, 12, 64, torch.bfloat16, fused=True)),
    Case("dropout in softmax fp32", "1024 x 1, 12 of 64",
         lambda: dropout_attention(1024, 12, 64, torch.float32, fused=False)),
    Case("dropout in softmax bf16", "1024 x 1, 12 of 64",
         lambda: dropout_attention(1024, 12, 64, torch.bfloat16, fused=False)),
]


def measure(case: Case, repeats: int, clock: Callable[[], float]) -> Row:
    """Least times of ``repeats`` runs of each side, one after the other, after one of each that does not count."""
    sides = case.make()
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for step, times in zip(sides, seconds):
            start = clock()
            step()
            if repeat:
                times.append(clock() - start)
    own, plain = (min(times) for times in seconds)
    return Row(case.name, case.shape, 1e3 * own, 1e3 * plain, plain / own, case.wanted)


def main() -> int:
    """1 where a ratio is below what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases whose name begins so (default: all)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cpu-time", action="store_true",
                        help="count processor time: for one thread, on a machine that others use too")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    library = kernels.load("cpu")
    chosen = [c for c in CASES if not args.names or c.name.startswith(tuple(args.names))]
    clock = time.process_time if args.cpu_time else time.perf_counter
    rows = [measure(case, args.repeats, clock) for case in chosen]
    if args.json:
        about = {"library": library, "torch": torch.__version__, "threads": args.threads, "repeats": args.repeats,
                 "clock": "cpu" if args.cpu_time else "wall"}
        print(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        print(f"{library}, torch {torch.__version__}, {args.threads} threads, least of {args.repeats}")
        print(f"{'':24}{'':20}{'own ms':>10}{'torch ms':>10}{'ratio':>8}  wanted")
        for row in rows:
            wanted = "" if row.wanted is None else f"{row.wanted:.1f}"
            print(f"{row.name:24}{row.shape:20}{row.own_ms:10.2f}{row.torch_ms:10.2f}{row.ratio:8.2f}  {wanted}")
    return int(any(row.wanted is not None and row.ratio < row.wanted for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
