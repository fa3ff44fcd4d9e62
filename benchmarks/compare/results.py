"""Medians, spread, MFU and ratios; the table and the JSON."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare.clocks import card
from benchmarks.compare.peer import PEERS, REFERENCE
from benchmarks.compare.run import LAYER_TOLERANCE, TOLERANCE, PeerResult, Plan, ours, reference_of
from benchmarks.compare.sizes import Size
from megatron_port.core.io.files import write_text
from megatron_port.ext.telemetry.flops import parameter_count

PEAKS = {"H100": 989.4, "H200": 989.4, "GH200": 989.4, "A100": 312.0, "A800": 312.0, "MI250X": 191.5, "MI300X": 1307.4}
"""TFLOP/s of dense bf16 on the datasheets, by what torch calls the device (MI250X: of one GCD)."""


def quartiles(values: Sequence[float]) -> dict[str, Any]:
    """Median and the quartiles around it."""
    if len(values) < 2:
        low = high = values[0]
    else:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": statistics.median(values), "q1": low, "q3": high, "all": list(values)}


def hardware(device: str, threads: int) -> dict[str, Any]:
    """What it ran on."""
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}", "cpu": _cpu_name(),
        "cores": os.cpu_count(), "threads": threads, "device": "cpu", "device_kind": device, "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        found["card"] = card(device)
        found |= {"device": found["card"]["name"], "memory": found["card"]["memory"]}
        found["library"] = f"hip {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
    return found


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        return platform.processor()
    return found.group(1).strip() if found else platform.processor()


def peak_of(device_name: str) -> float | None:
    """TFLOP/s of the datasheet; None: not known."""
    names = sorted(PEAKS, key=len, reverse=True)
    return next((PEAKS[name] for name in names if name in device_name), None)


def row(outcome: PeerResult, size: Size, peak: float | None, matmul: float | None) -> dict[str, Any]:
    """A peer's part of the JSON; what was not measured has no entry."""
    made: dict[str, Any] = {"peer": outcome.peer, "state": outcome.state, "settings": outcome.settings}
    for key in ("reason", "favour"):
        if value := getattr(outcome, key):
            made[key] = value
    if outcome.difference is not None:
        made["difference_over_tolerance"] = outcome.difference
    made |= {key: value for key, value in outcome.numbers.items() if key != "probes" or outcome.peer == REFERENCE}
    if not outcome.seconds:
        return made
    made |= {"seconds": quartiles(outcome.seconds), "cpu_seconds": quartiles(outcome.cpu_seconds),
             "clocks": outcome.clocks}
    median = made["seconds"]["median"]
    rate = size.flops / median / 1e12
    made |= {"tokens_per_second": size.tokens / median, "model_tflops": rate, "peak_memory_bytes": outcome.memory}
    if peak:
        made["mfu"] = rate / peak
    if matmul:
        made["share_of_matmul"] = rate / matmul
    return made


def summary(size: Size, outcomes: Sequence[PeerResult], rates: Sequence[dict[str, Any]], peak: float | None,
            plan: Plan) -> dict[str, Any]:
    """One size's part of the JSON."""
    matmul = quartiles([r["flops"] / 1e12 for r in rates]) if rates else None
    m = size.model
    rows = [row(o, size, peak, matmul["median"] if matmul else None) for o in outcomes]
    counted = {r["peer"]: r["seconds"]["median"] for r in rows if r["state"] == "counted" and "seconds" in r}
    peers = {name: s for name, s in counted.items() if not PEERS[name].ours}
    mine = {name: s for name, s in counted.items() if ours(name)}
    made: dict[str, Any] = {
        "size": size.name, "about": size.about, "dtype": size.dtype, "layers_only": size.layers_only,
        "model": {k: getattr(m, k) for k in ("name", "num_layers", "hidden_size", "num_attention_heads", "kv_heads",
                                             "head_size", "ffn_size", "vocab_size", "seq_length")},
        "micro_batch": size.micro_batch, "global_batch": size.global_batch, "tokens_per_step": size.tokens,
        "model_flops_per_step": size.flops,
        "tolerance": LAYER_TOLERANCE[size.dtype] if size.layers_only else TOLERANCE[size.dtype],
        "kept_together": min(plan.kept, len(rows)), "least_steps_per_repetition": plan.steps,
        "window_seconds": plan.window_s, "peers": rows,
    }
    if (reference := reference_of(outcomes)) is not None:
        made["reference"] = reference.peer
    if not size.layers_only:
        made["parameters"] = parameter_count(m)
    if peak:
        made["peak_tflops"] = peak
    if matmul:
        made["matmul_tflops"] = matmul
        made["copy_bytes_per_second"] = quartiles([r["bandwidth"] for r in rates])
        made["matmul_clocks"] = [r["clocks"] for r in rates]
    if "ours" in counted and any(PEERS[name].ours and PEERS[name].precision for name in counted):
        (bf16,) = (o for o in outcomes if o.peer == "ours")
        made["fp8_over_ours"] = {
            o.peer: quartiles([y / x for x, y in zip(o.seconds, bf16.seconds)])
            for o in outcomes if o.peer in counted and PEERS[o.peer].ours and PEERS[o.peer].precision
        }
    if mine and peers:
        best, fastest = min(mine, key=lambda n: mine[n]), min(peers, key=lambda n: peers[n])
        # By repetition, so that what slows the machine for a while slows both.
        a, b = (next(o for o in outcomes if o.peer == name) for name in (best, fastest))
        made["ours_over_fastest_peer"] = {
            "ours": best, "peer": fastest, "peers_counted": len(peers),
            **quartiles([y / x for x, y in zip(a.seconds, b.seconds)]),
            "by_cpu_seconds": quartiles([y / x for x, y in zip(a.cpu_seconds, b.cpu_seconds)]),
        }
    return made


def table(found: dict[str, Any]) -> str:
    """One size for people."""
    head = f"{found['size']} ({found['dtype']}, {found['about']}): {found['tokens_per_step']} tokens per step"
    lines = [head]
    if "matmul_tflops" in found:
        lines[0] += f"; products reach {found['matmul_tflops']['median']:.4g} TFLOP/s in this run"
    lines.append(f"  {'peer':<22}{'ms/step':>9} {'IQR':>7} {'tokens/s':>10} {'TFLOP/s':>8} {'MFU':>6} {'of matmul':>9} "
                 f"{'peak MiB':>9}  state")
    for r in found["peers"]:
        if "seconds" in r:
            s = r["seconds"]
            mfu = f"{r['mfu']:.1%}" if "mfu" in r else "-"
            share = f"{r['share_of_matmul']:.1%}" if "share_of_matmul" in r else "-"
            lines.append(
                f"  {r['peer']:<22}{s['median'] * 1e3:>9.2f} {(s['q3'] - s['q1']) / s['median']:>7.1%} "
                f"{r['tokens_per_second']:>10.0f} {r['model_tflops']:>8.3g} {mfu:>6} {share:>9} "
                f"{r['peak_memory_bytes'] / 2**20:>9.0f}  "
                + "; ".join([r["state"], *(r[key] for key in ("reason", "favour") if key in r)])
            )
        else:
            lines.append(f"  {r['peer']:<22}{r['state']}: {r.get('reason', '')}")
    if "ours_over_fastest_peer" in found:
        o = found["ours_over_fastest_peer"]
        many = f"{o['peers_counted']} counted peer{'s' if o['peers_counted'] != 1 else ''}"
        spread = f"{o['q1']:.3f} to {o['q3']:.3f}"
        lines.append(f"  {o['ours']} is {o['median']:.3f} × {o['peer']} ({spread}), the fastest of {many}; "
                     f"by processor time {o['by_cpu_seconds']['median']:.3f} ×")
    for name, ratio in found.get("fp8_over_ours", {}).items():
        lines.append(f"  {name} is {ratio['median']:.3f} × ours ({ratio['q1']:.3f} to {ratio['q3']:.3f})")
    return "\n".join(lines)


def document(found: Sequence[dict[str, Any]], about: dict[str, Any]) -> dict[str, Any]:
    """The whole file. ``about``: see :func:`hardware`."""
    return {
        "command": " ".join(["python", "-m", "benchmarks.compare", *sys.argv[1:]]), "time": time.time(),
        "hardware": about, "mfu": "model FLOPs (attention in full, recompute left out) over peak",
        "sizes": list(found),
    }


def write(path: Path, made: dict[str, Any]) -> None:
    """Write a result as JSON, whole or not at all."""
    write_text(path, json.dumps(made, indent=1) + "\n")
