"""Times of attention's providers on this GPU, and the table of them that a run reads.

    python benchmarks/attention_providers.py --json FILE             # measure
    python benchmarks/attention_providers.py --table FILE [FILE ...] # into configs/kernels/attention.json

A file is this program's or ``gpu_kernels.py``'s, whose rows are the same. Forward, and forward + backward, of causal
attention; one micro-batch of 16,384 tokens. With dropout there are the own kernel and math, which no table chooses
between. FA3 takes the place of torch's flash attention for the rest
of the process, so it comes last. A provider that does not run is a row with the reason, and not in the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.device_clock import time_calls
from megatron_port.core.dist.positions import Positions
from megatron_port.core.io.files import write_text
from megatron_port.core.layers.attention import Attention, math_attention
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.ext.kernels.attention_choice import PROVIDERS, arch_of, parse
from megatron_port.ext.kernels.kernels import optional_import
from megatron_port.ext.kernels.ops import attention as own
from megatron_port.ext.kernels.torch_attention import flash_attention, sdpa_attention

TABLE = Path(__file__).resolve().parents[1] / "configs" / "kernels" / "attention.json"
SHAPES = ((1024, 16, 12, 64), (2048, 8, 25, 64), (2048, 8, 32, 128), (4096, 4, 32, 128), (8192, 2, 32, 128),
          (32768, 1, 8, 128))
"""(tokens, samples, heads, head size)"""
DROPPED = (SHAPES[0], SHAPES[2])
"""With dropout. Math keeps probabilities: 16 and 17 GB of bf16 there."""


def providers() -> Iterator[tuple[str, Callable[[], Attention]]]:
    """Yield each provider with what makes it; making may fail."""
    for name in ("cudnn", "flash", "efficient"):
        backend = getattr(SDPBackend, f"{name.upper()}_ATTENTION")
        yield name, lambda backend=backend: sdpa_attention([backend])  # type: ignore[misc]

    def package() -> Attention:
        module, problem = optional_import("flash_attn")
        if module is None:
            raise RuntimeError(problem)
        return flash_attention(module.flash_attn_func)

    def fa3() -> Attention:
        torch.nn.attention.activate_flash_attention_impl("FA3")
        return sdpa_attention([SDPBackend.FLASH_ATTENTION])

    yield "flash_attn", package
    yield "fa3", fa3


def dropping(device: torch.device, seq: int, batch: int) -> Iterator[tuple[str, Callable[[], Attention]]]:
    """Yield what applies dropout to probabilities."""
    stream = DropoutStream(1, device)
    stream.set_micro_batch(0, range(batch))
    drop = stream.probability_dropout(0.1, op="attention", head_offset=0, positions=Positions.contiguous(seq))
    for name, function in (("own", own.attention), ("math", math_attention)):
        yield name, lambda function=function: partial(function, dropout=drop)  # type: ignore[misc]


def rows(
    device: torch.device, shapes: Sequence[tuple[int, int, int, int]] = SHAPES, dropped: Sequence[Any] = DROPPED
) -> Iterator[dict[str, Any]]:
    """Yield a row for each provider and shape, in bf16; ``dropped``: the shapes that are measured with dropout."""
    arch = arch_of(device) if device.type == "cuda" else "cpu"
    cases = [(False, name, make, shape) for name, make in providers() for shape in shapes]
    cases[:0] = [(True, name, make, shape) for shape in dropped for name, make in dropping(device, *shape[:2])]
    for dropout, name, make, (seq, batch, heads, size) in cases:
        row: dict[str, Any] = {"arch": arch, "dtype": "bf16", "head_dim": size, "seq": seq, "causal": True,
                               "dropout": dropout, "shape": f"s{seq} b{batch} h{heads} d{size}", "provider": name}
        try:
            attend = make()
            q, k, v = (torch.randn(seq, batch, heads, size, device=device, dtype=torch.bfloat16, requires_grad=True)
                       for _ in range(3))
            grad = torch.randn(seq, batch, heads * size, device=device, dtype=torch.bfloat16)

            def forward(_: int) -> Tensor:
                return attend(q, k, v)  # noqa: B023

            def both(i: int) -> None:
                torch.autograd.grad(forward(i), (q, k, v), grad)  # noqa: B023

            taken = time_calls({"forward": forward, "both": both}, device)
            flops = 4.0 * batch * heads * seq * seq * size
            row.update(forward_tflops=flops / taken["forward"].device_s / 1e12,
                       both_tflops=3.5 * flops / taken["both"].device_s / 1e12,
                       milliseconds=1e3 * taken["both"].device_s)
        except (RuntimeError, ImportError, AttributeError) as error:
            row["failed"] = str(error)[:200]
        yield row


def describe(row: dict[str, Any]) -> str:
    """Return a row as a line."""
    rates = row.get("failed") or f"{row['forward_tflops']:.0f} forward, {row['both_tflops']:.0f} both, TFLOP/s"
    name = f"{row['provider']}{', dropout' * row['dropout']}"
    return f"attention {row['shape']:<24}{name:<22}{rates}"


def table(measured: dict[str, list[dict[str, Any]]]) -> str:
    """Return the table's text; ``measured``: file → its rows. Of equal heads and tokens the fastest call counts."""
    kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
    fields = ("arch", "dtype", "head_dim", "seq", "causal", "dropout")
    for source, found in measured.items():
        for row in found:
            if "failed" in row or row["provider"] not in PROVIDERS:
                continue
            key = tuple(row[f] for f in fields)
            times = kinds.setdefault(key, {**dict(zip(fields, key)), "milliseconds": {}, "source": source})
            known = times["milliseconds"].get(row["provider"], float("inf"))
            times["milliseconds"][row["provider"]] = round(min(known, row["milliseconds"]), 4)
    lines = ",\n".join(json.dumps(kinds[key]) for key in sorted(kinds))
    text = '{"rows": [\n' + lines + "\n]}\n"
    parse(text, "the new table")
    return text


def main(argv: list[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the measured rows here")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="write the table from these files' rows")
    args = parser.parse_args(argv)
    if args.table:
        TABLE.write_text(table({p.name: json.loads(p.read_text())["attention"] for p in args.table}))
        return 0
    if not torch.cuda.is_available():
        print("no GPU that torch can use", file=sys.stderr)
        return 3
    made: list[dict[str, Any]] = []
    for row in rows(torch.device("cuda")):
        made.append(row)
        print(describe(row), flush=True)
        if args.json:
            write_text(args.json, json.dumps({"attention": made}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
