"""README.md of a site's report: what was done, and the predictions beside the measurements."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Done(Protocol):
    """Of a part; see ``part_runner.PartResult``."""

    name: str
    seconds: float
    says: str
    files: str

    @property
    def state(self) -> str: ...


def overview(folder: Path, about: Mapping[str, Any], outcomes: Sequence[Done]) -> str:
    """The whole text. ``about``: how the report was made, word → value."""
    lines = ["# Site report", "", *(f"- {word}: {value}" for word, value in about.items()), "",
             "Times are by the wall unless they say else. Names of users, hosts, folders, addresses and what looks "
             "like a secret were replaced (CHECKOUT, ENVIRONMENT, HOME, USER, HOST, HOST-2, ADDRESS, ***). Each part's "
             "command and exit code are in summary.json.", "",
             "| part | state | took, s | files | shows |", "|---|---|---|---|---|"]
    for o in outcomes:
        files = ", ".join([f"{o.name}.txt", *filter(None, [o.files])])
        lines.append(f"| {o.name} | {o.state} | {o.seconds:.0f} | {files} | {o.says} |")
    failed = [o for o in outcomes if o.state != "ok"]
    for o in failed:
        lines += ["", f"The end of {o.name}.txt ({o.state}):", "", "```", *last_lines(folder / f"{o.name}.txt"), "```"]
    compared, predicted = (read_json(folder / name) for name in ("compare.json", "predicted.json"))
    lines += ["", "## Predicted and measured", "", *_predictions(compared, predicted), "", "## Compared", ""]
    for size in compared.get("sizes", []):
        lines += _compared(size)
    if not compared.get("sizes"):
        lines += ["Nothing: compare did not end well (see its state).", ""]
    return "\n".join(lines)


def last_lines(path: Path, count: int = 8) -> list[str]:
    """Of a part's output."""
    try:
        return [line[:300] for line in path.read_text(errors="replace").splitlines()[-count:]]
    except OSError:
        return []


def _predictions(compared: dict[str, Any], predicted: dict[str, Any]) -> list[str]:
    if not predicted.get("rows"):
        return ["None: compare, calibrate or predict did not end well (see their states)."]
    lines = ["One process. Predicted by the planner from the rates in calibrated.toml, before it knew any of these "
             "times; measured by compare. On a busy machine processor time says more than the wall.", "",
             "| size | as | step predicted, ms | measured, ms (off by) | processor time, ms (off by) | "
             "memory predicted, MB | measured, MB |",
             "|---|---|---|---|---|---|---|"]
    for r in predicted["rows"]:
        planned, wall, cpu = (r.get(key, 0.0) for key in ("predicted_seconds", "measured_seconds",
                                                          "measured_cpu_seconds"))
        busy = f"{cpu * 1e3:.4g} ({planned / cpu - 1:+.0%})" if cpu else "-"
        lines.append(f"| {r['size']} | {r['peer']} | {planned * 1e3:.4g} | {wall * 1e3:.4g} ({r['time_error']:+.0%}) | "
                     f"{busy} | {r['predicted_bytes'] / 1e6:.4g} | {r['measured_bytes'] / 1e6:.4g} |")
    planned_sizes = {r["size"] for r in predicted["rows"]}
    left = [s["size"] for s in compared.get("sizes", []) if s["size"] not in planned_sizes]
    if left:
        lines += ["", f"Not predicted: {', '.join(left)} (layers alone, or no row of this project was measured)."]
    return lines


def _compared(size: dict[str, Any]) -> list[str]:
    rate = f"; products reach {size['matmul_tflops']['median']:.4g} TFLOP/s" if "matmul_tflops" in size else ""
    lines = [f"{size['size']} ({size['about']}), {size['dtype']}, {size['model']['num_layers']} layers, "
             f"{size['tokens_per_step']} tokens per step{rate}:", "",
             "| peer | state | step, ms (quartiles) | processor time, ms | tokens/s | MFU | of products | peak memory, "
             "MB |",
             "|---|---|---|---|---|---|---|---|"]
    for r in size["peers"]:
        why = f"{r['state']}: {r['reason']}" if r.get("reason") else r["state"]
        if "seconds" not in r:
            lines.append(f"| {r['peer']} | {why} | | | | | | |")
            continue
        middle, low, high = (f"{r['seconds'][k] * 1e3:.4g}" for k in ("median", "q1", "q3"))
        mfu, share = (f"{r[key]:.1%}" if key in r else "-" for key in ("mfu", "share_of_matmul"))
        lines.append(
            f"| {r['peer']} | {why} | {middle} ({low} to {high}) | {r['cpu_seconds']['median'] * 1e3:.4g} | "
            f"{r['tokens_per_second']:.0f} | {mfu} | {share} | {r['peak_memory_bytes'] / 1e6:.4g} |"
        )
    ratio = size.get("ours_over_fastest_peer")
    if ratio:
        lines += ["", f"{ratio['ours']} is {ratio['median']:.3f} × as fast as {ratio['peer']} ({ratio['q1']:.3f} to "
                  f"{ratio['q3']:.3f}), the fastest of {ratio['peers_counted']} counted; by processor time "
                  f"{ratio['by_cpu_seconds']['median']:.3f} ×."]
    return [*lines, ""]


def read_json(path: Path) -> dict[str, Any]:
    """What it holds; nothing where it is not there or damaged."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except (OSError, ValueError):
        return {}
