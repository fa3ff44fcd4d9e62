"""Own kernels on a GPU against eager torch, torch.compile and, where importable, apex and Liger.

    python benchmarks/gpu_kernels.py --json benchmarks/results/kernels-NAME.json
    python benchmarks/gpu_kernels.py --rows --variants own eager                 # norms at few to many rows; state hash
    python benchmarks/gpu_kernels.py --device cpu --tiny --variants own eager    # that it runs, no times

Per op and shape: the device's time of the forward pass and of forward + backward, and the host's to launch them
(``device_clock``: many calls queued behind a plug, inputs larger than the last cache); the bytes that must move at
least (each input read once, each output written once); and the rate of those bytes over the rate of a plain copy in
the same run. All variants of a case alternate; the median of the repeats is kept. Then attention by provider, in
TFLOP/s of causal attention counted in full. torch.compile is used here on purpose; training does not. The file is
written after every case, so that a run that is stopped leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks import attention_providers
from benchmarks.compare.clocks import ClockLog, card, clock_log
from benchmarks.device_clock import Timing, copies_of, copy_bandwidth, time_calls
from megatron_port.core.dist.row_hashes import RowHashes
from megatron_port.core.io.files import write_text
from megatron_port.core.layers import fused
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.fp8 import FNUZ, OCP, own_quantiser, torch_quantiser
from megatron_port.ext.kernels.kernels import optional_import
from megatron_port.ext.kernels.ops import (
    activation,
    norm,
    optimizer,
    rotary,
    softmax,
)
from megatron_port.ext.kernels.ops import (
    norm as dropout,
)
from megatron_port.ext.kernels.ops import (
    norm as residual_norm,
)
from megatron_port.ext.kernels.ops import (
    softmax as cross_entropy,
)


@dataclass
class Case:
    """One op at one shape. ``variants``: name → function of the inputs; own and eager are there."""

    name: str
    shape: str
    inputs: tuple[Any, ...]
    variants: dict[str, Callable[..., Any]]
    forward_bytes: float
    backward_bytes: float = 0.0
    """0: no backward pass is timed."""


@dataclass
class Result:
    """Milliseconds by variant, on the device and to launch on the host, and own bytes/s over copy's."""

    name: str
    shape: str
    copies: int = 1
    """Of the inputs, taken in turn."""
    forward_ms: dict[str, float] = field(default_factory=dict)
    both_ms: dict[str, float] = field(default_factory=dict)
    forward_host_ms: dict[str, float] = field(default_factory=dict)
    both_host_ms: dict[str, float] = field(default_factory=dict)
    forward_share: float = 0.0
    both_share: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)

    def take_forward(self, timings: dict[str, Timing], moved: float, bandwidth: float) -> None:
        """Note the times of a pass that moves so many bytes."""
        self.forward_ms, self.forward_host_ms, self.forward_share = _in_ms(timings, moved, bandwidth)

    def take_both(self, timings: dict[str, Timing], moved: float, bandwidth: float) -> None:
        """Note the times of forward + backward."""
        self.both_ms, self.both_host_ms, self.both_share = _in_ms(timings, moved, bandwidth)


def _in_ms(
    timings: dict[str, Timing], moved: float, bandwidth: float
) -> tuple[dict[str, float], dict[str, float], float]:
    """(device ms, host ms, own bytes/s over ``bandwidth``)."""
    device = {name: t.device_s * 1e3 for name, t in timings.items()}
    host = {name: t.host_s * 1e3 for name, t in timings.items()}
    return device, host, moved / timings["own"].device_s / bandwidth if "own" in timings else 0.0


def _floats(inputs: tuple[Any, ...]) -> list[Tensor]:
    return [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]


def _outputs(out: Any) -> list[Tensor]:
    return [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, Tensor) and o.requires_grad]


def measure(case: Case, bandwidth: float, device: torch.device, wanted: Collection[str] = ()) -> Result:
    """Time the ``wanted`` variants of a case (empty: all)."""
    copies = copies_of(case.inputs, device)
    result = Result(case.name, case.shape, len(copies))
    forward: dict[str, Callable[[int], Any]] = {}
    both: dict[str, Callable[[int], Any]] = {}
    for name, function in case.variants.items():
        if wanted and name not in wanted:
            continue
        try:
            grads = [torch.randn_like(o) for o in _outputs(function(*case.inputs))]
        except Exception as error:  # a peer that cannot run is listed, not counted
            result.failed[name] = f"{type(error).__name__}: {error}"[:300]
            continue

        def run_forward(i: int, function: Callable[..., Any] = function) -> None:
            with torch.no_grad():
                function(*copies[i])

        def run_both(i: int, function: Callable[..., Any] = function, grads: list[Tensor] = grads) -> None:
            outs = _outputs(function(*copies[i]))
            torch.autograd.grad(outs, _floats(copies[i]), grads, allow_unused=True)

        forward[name] = run_forward
        if case.backward_bytes:
            both[name] = run_both
    result.take_forward(time_calls(forward, device, copies=len(copies)), case.forward_bytes, bandwidth)
    if both:
        moved = case.forward_bytes + case.backward_bytes
        result.take_both(time_calls(both, device, copies=len(copies)), moved, bandwidth)
    return result


def _leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def norm_cases(tokens: int, hidden: int) -> list[Case]:
    """LayerNorm and RMSNorm, with the residual add."""
    x, r, w, b = _leaf(tokens, hidden), _leaf(tokens, hidden), _leaf(hidden), _leaf(hidden)
    size = tokens * hidden * 2.0
    plain = {
        "own": lambda x, w: norm.rms_norm(x, w, 1e-5),
        "eager": lambda x, w: fused.torch_rms_norm(x, None, w, None, 1e-5)[0],
        "compile": torch.compile(lambda x, w: fused.torch_rms_norm(x, None, w, None, 1e-5)[0]),
    }
    added = {
        "own": lambda x, r, w: norm.add_rms_norm(x, r, w, 1e-5),
        "eager": lambda x, r, w: fused.torch_rms_norm(x, r, w, None, 1e-5),
        "compile": torch.compile(lambda x, r, w: fused.torch_rms_norm(x, r, w, None, 1e-5)),
    }
    layer = {
        "own": lambda x, w, b: norm.layer_norm(x, w, b, 1e-5),
        "eager": lambda x, w, b: fused.torch_layer_norm(x, None, w, b, 1e-5)[0],
        "compile": torch.compile(lambda x, w, b: fused.torch_layer_norm(x, None, w, b, 1e-5)[0]),
    }
    apex, _ = optional_import("apex.normalization.fused_layer_norm")
    if apex is not None:
        plain["apex"] = lambda x, w: apex.fused_rms_norm_affine(x, w, w.shape, 1e-5)
        layer["apex"] = lambda x, w, b: apex.fused_layer_norm_affine(x, w, b, w.shape, 1e-5)
    liger, _ = optional_import("liger_kernel.ops.rms_norm")
    if liger is not None:
        plain["liger"] = lambda x, w: liger.LigerRMSNormFunction.apply(x, w, 1e-5, 0.0, "llama", False)
    shape = f"{tokens}x{hidden}"
    return [
        Case("rms_norm", shape, (x, w), plain, 2 * size, 3 * size),
        Case("add_rms_norm", shape, (x, r, w), added, 4 * size, 4 * size),
        Case("layer_norm", shape, (x, w, b), layer, 2 * size, 3 * size),
    ]


def activation_cases(tokens: int, width: int) -> list[Case]:
    """SwiGLU on the packed projection, bias + GeLU."""
    packed, x, b = _leaf(tokens, 2 * width), _leaf(tokens, width), _leaf(width)
    size = tokens * width * 2.0
    swiglu = {"own": activation.swiglu, "eager": fused.torch_swiglu, "compile": torch.compile(fused.torch_swiglu)}
    liger, _ = optional_import("liger_kernel.ops.swiglu")
    if liger is not None:
        swiglu["liger"] = lambda y: liger.LigerSiLUMulFunction.apply(*(c.contiguous() for c in y.chunk(2, -1)))
    gelu = {
        "own": lambda x, b: activation.bias_gelu(x, b, approximate=True),
        "eager": lambda x, b: fused.torch_bias_gelu(x, b, approximate=True),
        "compile": torch.compile(lambda x, b: fused.torch_bias_gelu(x, b, approximate=True)),
    }
    return [
        Case("swiglu", f"{tokens}x2x{width}", (packed,), swiglu, 3 * size, 5 * size),
        Case("bias_gelu", f"{tokens}x{width}", (x, b), gelu, 2 * size, 3 * size),
    ]


def attention_side_cases(seq: int, batch: int, groups: int, per_group: int, size: int) -> list[Case]:
    """Split + rotary of the packed projection; causal softmax."""
    qkv = _leaf(seq, batch, groups, per_group + 2, size)
    exponent = torch.arange(0, size, 2) / size
    angle = torch.outer(torch.arange(seq).float(), 1e4**-exponent)
    cos, sin = angle.cos(), angle.sin()
    split = {
        "own": lambda y: rotary.split_rotary(y, cos, sin), "eager": lambda y: fused.torch_split_rotary(y, cos, sin),
        "compile": torch.compile(lambda y: fused.torch_split_rotary(y, cos, sin)),
    }
    heads = 8
    scores = _leaf(batch, heads, seq, seq)
    soft = {
        "own": lambda s: softmax.causal_softmax(s, scale=1.0),
        "eager": lambda s: fused.torch_causal_softmax(s, scale=1.0),
        "compile": torch.compile(lambda s: fused.torch_causal_softmax(s, scale=1.0)),
    }
    moved, square = qkv.numel() * 2.0, scores.numel() * 2.0
    return [
        Case("split_rotary", f"s{seq} b{batch} g{groups} r{per_group} d{size}", (qkv,), split, 2 * moved, 2 * moved),
        # Half of the scores are read, all of the probabilities written; backward reads half of two.
        Case("causal_softmax", f"{batch}x{heads}x{seq}x{seq}", (scores,), soft, 1.5 * square, 2 * square),
    ]


def residual_cases(seq: int, batch: int, hidden: int) -> list[Case]:
    """Bias + dropout + residual, and the same with the norm that follows."""
    x, r, b, w = _leaf(seq, batch, hidden), _leaf(seq, batch, hidden), _leaf(hidden), _leaf(hidden)
    keys = torch.arange(batch) * 7919
    join = {
        "own": lambda x, b, r: dropout.bias_dropout_add(
            x, b, r, keys, op_key=5, p=0.1, seq_offset=0, width=hidden, width_offset=0),
        "eager": lambda x, b, r: r + torch.nn.functional.dropout(x + b, 0.1),
        "compile": torch.compile(lambda x, b, r: r + torch.nn.functional.dropout(x + b, 0.1)),
    }
    def joined(x: torch.Tensor, b: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = r + torch.nn.functional.dropout(x + b, 0.1)
        return torch.nn.functional.layer_norm(total, w.shape, w, w), total

    join_norm = {
        "own": lambda x, b, r, w: residual_norm.bias_dropout_add_norm(
            x, b, r, keys, w, w, op_key=5, p=0.1, seq_offset=0, eps=1e-5, rms=False),
        "eager": joined, "compile": torch.compile(joined),
    }
    shape, wide = f"{seq}x{batch}x{hidden}", x.numel() * 2.0
    return [
        Case("bias_dropout_add", shape, (x, b, r), join, 3 * wide, 2 * wide),
        Case("bias_dropout_add_norm", shape, (x, b, r, w), join_norm, 4 * wide, 5 * wide),
    ]


def loss_case(tokens: int, vocab: int) -> Case:
    """Cross-entropy: one read forward, a read and a write backward."""
    logits = _leaf(tokens, vocab)
    labels = torch.randint(0, vocab, (tokens,))
    grad = torch.full((tokens,), 1.0 / tokens)

    def own(x: Tensor) -> Tensor:
        x = x.detach()
        maximum, total, target = cross_entropy.statistics(x, labels, offset=0, extent=vocab)
        loss = total.log() + maximum - target
        if torch.is_grad_enabled():
            cross_entropy.gradient_(x, labels, maximum, total, grad, offset=0, extent=vocab)
        return loss

    def eager(x: Tensor) -> Tensor:
        loss = torch.nn.functional.cross_entropy(x, labels, reduction="none")
        if torch.is_grad_enabled():
            torch.autograd.grad(loss, x, grad)
        return loss

    compiled = torch.compile(lambda x: torch.nn.functional.cross_entropy(x.float(), labels, reduction="none"))

    def with_compile(x: Tensor) -> Tensor:
        loss = compiled(x)
        if torch.is_grad_enabled():
            torch.autograd.grad(loss, x, grad)
        return loss

    size = tokens * vocab * 2.0
    return Case("cross_entropy (both: forward + backward)", f"{tokens}x{vocab}", (logits,),
                {"own": own, "eager": eager, "compile": with_compile}, size, 0.0)


def measure_loss(case: Case, bandwidth: float, device: torch.device, wanted: Collection[str] = ()) -> Result:
    """Time the loss, which runs its own backward, in place."""
    result = measure(case, bandwidth, device, wanted)
    (logits,) = case.inputs
    functions = {n: (lambda i, f=f: f(logits)) for n, f in case.variants.items() if n in result.forward_ms}
    result.take_both(time_calls(functions, device), 3 * case.forward_bytes, bandwidth)
    return result


def optimizer_cases(parameters: int) -> list[Case]:
    """AdamW with bf16 weights, fp32 masters and gradients; squared norm."""
    count, each = 96, parameters // 96
    masters = [torch.randn(each) for _ in range(count)]
    weights = [m.bfloat16() for m in masters]
    grads, first, second = ([torch.rand_like(m) for m in masters] for _ in range(3))
    step = torch.tensor(10.0)
    common: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

    def own() -> None:
        optimizer.adamw_(weights, masters, grads, first, second, step=step, grad_scale=None, skip=None, **common)

    for m, g in zip(masters, grads):
        m.grad = g
    fast = torch.optim.AdamW(masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def fused_torch() -> None:
        fast.step()
        torch._foreach_copy_(weights, masters)

    n = float(each * count)
    return [
        Case("adamw", f"{n / 1e6:.0f} M parameters", (), {"own": own, "eager": fused_torch}, 30 * n),
        Case("square_norm", f"{n / 1e6:.0f} M elements", (), {
            "own": lambda: optimizer.square_norm(grads),
            "eager": lambda: torch.stack(torch._foreach_norm(grads)).square().sum(),
        }, 4 * n),
    ]


def quantise_cases(tokens: int, width: int) -> list[Case]:
    """Casts of an operand to 8 bits: as a linear's passes ask for them.

    The least: x once, and once more where a scale is needed before the first element can be written; rows fit a block.
    """
    fnuz = torch.version.hip and "gfx942" in getattr(torch.cuda.get_device_properties(0), "gcnArchName", "")
    formats = FNUZ if fnuz else OCP
    x = torch.randn(tokens, width, dtype=torch.bfloat16)
    inverse = torch_quantiser.tensor(x, formats.precise).inverse
    passes: dict[str, tuple[float, Callable[[Any, Tensor], Any]]] = {
        "quantise tensor": (5.0, lambda q, x: q.tensor(x, formats.precise)),
        "quantise both": (6.0, lambda q, x: q.both(x, formats.wide)),
        "quantise transposed, known": (3.0, lambda q, x: q.transposed(x, formats.precise, inverse)),
        "quantise rows": (3.0, lambda q, x: q.rows(x, formats.precise)),
        "quantise columns": (5.0, lambda q, x: q.columns(x, formats.precise)),
    }
    out = []
    for name, (size, cast) in passes.items():
        variants: dict[str, Callable[..., Any]] = {
            "own": partial(cast, own_quantiser), "eager": partial(cast, torch_quantiser),
            "compile": torch.compile(partial(cast, torch_quantiser)),
        }
        out.append(Case(name, f"{tokens}x{width}", (x,), variants, size * x.numel()))
    return out


ROWS, WIDTHS = (256, 1024, 2048, 4096, 8192), (1600, 4096, 8192)
"""Of the norms that a session on a GPU times: few rows are what tensor parallelism leaves, widths those of models."""


def hash_case(words: int) -> Case:
    """The state check's hash: each word read once. Eager: the sum of the words, which must read them too."""
    state, digest = torch.randn(words), RowHashes(torch.get_default_device())
    return Case("state hash", f"{words / 1e6:.0f} M words", (state,), {
        "own": digest, "eager": lambda x: x.view(torch.int32).sum()}, 4.0 * words)


def row_cases(tiny: bool) -> list[Callable[[], list[Case]]]:
    """The hash of the state, and norms at few to many rows."""
    rows, widths, words = ((16, 64), (64,), 1 << 16) if tiny else (ROWS, WIDTHS, 1 << 25)
    norms = [partial(norm_cases, r, width) for width in widths for r in rows]
    return [lambda: [hash_case(words)], *norms]


def cases(tiny: bool = False) -> list[Callable[[], list[Case]]]:
    """Made one group at a time, so that memory is free again before the next. ``tiny``: one small shape of each op."""
    if tiny:
        return [
            lambda: norm_cases(64, 64), lambda: activation_cases(64, 64), lambda: attention_side_cases(32, 2, 2, 2, 16),
            lambda: residual_cases(32, 2, 64), lambda: [loss_case(64, 512)], lambda: optimizer_cases(96_000),
            lambda: quantise_cases(64, 64),
        ]
    return [
        lambda: norm_cases(16384, 1600), lambda: norm_cases(16384, 4096), lambda: norm_cases(16384, 8192),
        # Few rows, as a rank has with small micro-batches or sequence parallelism.
        *(partial(norm_cases, rows, hidden) for rows in (256, 1024, 2048, 4096) for hidden in (1600, 8192)),
        lambda: norm_cases(8192, 12288), lambda: activation_cases(16384, 6400), lambda: activation_cases(16384, 14336),
        lambda: attention_side_cases(4096, 4, 32, 1, 128), lambda: attention_side_cases(4096, 4, 8, 4, 128),
        lambda: residual_cases(4096, 4, 4096), lambda: [loss_case(8192, 50304)], lambda: [loss_case(8192, 128256)],
        lambda: optimizer_cases(768_000_000),
        lambda: quantise_cases(4096, 4096), lambda: quantise_cases(16384, 16384),
    ]


def show(found: Result) -> None:
    """Print a case."""
    for label, ms, host, share in (("fwd", found.forward_ms, found.forward_host_ms, found.forward_share),
                                   ("both", found.both_ms, found.both_host_ms, found.both_share)):
        if "own" in ms:
            others = "  ".join(f"{n} {t:.3f}" for n, t in ms.items() if n != "own")
            head = f"{found.name:<42}{found.shape:<26}{label:<6}"
            print(f"{head}{ms['own']:>8.3f}{host['own']:>8.3f}{share:>8.0%}   {others}", flush=True)
    for name, why in found.failed.items():
        print(f"    {name} does not run: {why}")


def measure_all(device: torch.device, hardware: dict[str, Any], args: argparse.Namespace, clocks: ClockLog) -> None:
    """Measure and print every case, then attention; write the file after each."""
    made: dict[str, Any] = {"hardware": hardware, "ops": [], "attention": []}

    def write() -> None:
        if args.json:
            write_text(args.json, json.dumps(made, indent=1) + "\n")

    bandwidth = hardware["copy_gb_s"] * 1e9
    for make in row_cases(args.tiny) if args.rows else cases(args.tiny):
        for case in make():
            if args.only and not any(word in case.name for word in args.only):
                continue
            timed = measure_loss if case.name.startswith("cross") else measure
            found, clocked = clocks.timed(lambda: timed(case, bandwidth, device, args.variants))  # noqa: B023 - called here
            made["ops"].append({**asdict(found), "clocks": clocked})
            write()
            show(found)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if args.rows:
        return
    tiny, words = ((32, 2, 2, 16),), args.only or ["attention", "dropout"]
    shapes = (tiny if args.tiny else attention_providers.SHAPES) if "attention" in words else ()
    dropped = (tiny if args.tiny else attention_providers.DROPPED) if "dropout" in words else ()
    for row in attention_providers.rows(device, shapes, dropped):
        made["attention"].append(row)
        write()
        print(attention_providers.describe(row))


def main(argv: list[str] | None = None) -> int:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cuda is also ROCm's name")
    parser.add_argument("--tiny", action="store_true", help="one small shape of each op")
    parser.add_argument("--rows", action="store_true", help="norms at 256 to 8,192 rows and the state's hash alone")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose name has one of these words")
    parser.add_argument("--variants", nargs="+", default=[], metavar="NAME", help="own, eager, compile, apex, liger")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU that torch can use", file=sys.stderr)
        return 3
    device = torch.device(args.device)
    library = kernels.load("cpu" if args.device == "cpu" else "rocm" if torch.version.hip else "cuda")
    bandwidth = copy_bandwidth(device, 1 << 20 if args.tiny else 2 << 30)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    hardware = {"device": name, "torch": torch.__version__, "library": library, "copy_gb_s": bandwidth / 1e9,
                "date": time.strftime("%Y-%m-%d"), "card": card(args.device),
                "command": " ".join(sys.argv if argv is None else argv)}
    print(f"{name}, torch {torch.__version__}, {library}, copy {bandwidth / 1e9:.0f} GB/s")
    print(f"{'op':<42}{'shape':<26}{'pass':<6}{'own ms':>8}{'launch':>8}{'of copy':>8}   others, ms")
    with device, clock_log(args.device) as clocks:  # the cases make their tensors on it
        measure_all(device, hardware, args, clocks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
