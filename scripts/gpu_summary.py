"""What the parts of a GPU session left in their files, and one line for people about each. Standard library only."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

Data = dict[str, Any]


def data_of(name: str, folder: Path) -> Data | None:
    """Return what a part measured, as JSON can hold it; None: it left nothing that can be read."""
    try:
        if name == "doctor":
            text = (folder / "doctor.txt").read_text()
            found: Data = json.loads(text[text.index("{"):])
            return found
        if name in ("kernels", "engine"):
            return _tests(folder / f"{name}.xml")
        if name == "layouts":
            return _layouts((folder / "layouts.txt").read_text())
        if name == "calibrate":
            return {key: (folder / f"calibrated.{key}").read_text() for key in ("toml", "csv")}
        loaded: Data = json.loads((folder / f"{name}.json").read_text())
        return loaded
    except (OSError, ValueError, ElementTree.ParseError):
        return None


def _tests(path: Path) -> Data:
    """Counts and failures of pytest's junit file."""
    suite = next(ElementTree.parse(path).iter("testsuite"))
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = {f"{case.get('classname')}.{case.get('name')}": (case.find(kind).get("message") or "")[:300]  # type: ignore[union-attr]
              for case in suite.iter("testcase") for kind in ("failure", "error") if case.find(kind) is not None}
    return {**counts, "failed": failed, "seconds": float(suite.get("time", 0))}


def _layouts(text: str) -> Data:
    """Lines of ``megatron-port parity`` that judge a layout."""
    lines = [line.strip() for line in text.splitlines()]
    return {"equal": [x for x in lines if "EQUAL within tolerance" in x],
            "other": [x for x in lines if re.search(r"\bDIFFER", x)], "end": lines[-12:]}


def _headline_calibrate(data: Data, _: Data) -> str:
    wanted = ("matmul_scale", "attention_scale", "memory_scale", "matmul_tflops", "memory_bandwidth_gb")
    lines = [line.partition("#")[0].strip() for line in data["toml"].splitlines()]
    return "; ".join(line for line in lines if line.startswith(wanted)) or f"{data['csv'].count(chr(10))} rows"


def _headline_doctor(data: Data, _: Data) -> str:
    bad = [f"{f['name']}: {f['value']}" for f in data["findings"] if f["status"] in ("wrong", "slow")]
    return "; ".join(bad[:3])[:300] or "nothing wrong"


def _headline_tests(data: Data, _: Data) -> str:
    passed = data["tests"] - data["failures"] - data["errors"] - data["skipped"]
    bad = f"; failed: {', '.join(list(data['failed'])[:4])}" if data["failed"] else ""
    return f"{passed} passed, {data['skipped']} skipped{bad}"


def _headline_train(data: Data, _: Data) -> str:
    return (f"loss {data['first_loss']:.2f} to {data['last_loss']:.2f} in {len(data['steps'])} steps, resumed at "
            f"{data['resumed_at']}, {data['tokens_per_second']:,.0f} tokens/s")


def _headline_step(data: Data, _: Data) -> str:
    rows = [r for r in data["rows"] if "difference_over_tolerance" in r]
    if not rows:
        return "nothing ran"
    worst = max(rows, key=lambda r: r["difference_over_tolerance"])
    return (f"worst of {len(rows)}: {worst['difference_over_tolerance']:.3g} tolerances ({worst['peer']}, "
            f"{worst['size']})")


def _headline_ops(data: Data, _: Data) -> str:
    other = "compile" if any("compile" in o["forward_ms"] for o in data["ops"]) else "eager"
    shares, slower, bound = [], [], 0
    for op in data["ops"]:
        for kind in ("forward", "both"):
            ms, host = op[f"{kind}_ms"], op[f"{kind}_host_ms"]
            if "own" in ms:
                shares.append(op[f"{kind}_share"])
                bound += host["own"] > ms["own"]
                if other in ms and ms["own"] > ms[other]:
                    slower.append(f"{op['name']} {op['shape']} {kind} {ms['own'] / ms[other]:.2f}")
    if not shares:
        return "no own kernel ran"
    middle = sorted(shares)[len(shares) // 2]
    worse = f"; slower than {other}: {', '.join(slower[:4])}{' …' if len(slower) > 4 else ''}" if slower else ""
    return (f"copy {data['hardware']['copy_gb_s']:.0f} GB/s; of it {min(shares):.0%} to {max(shares):.0%}, median "
            f"{middle:.0%}; launch-bound {bound} of {len(shares)}{worse}")


def _rate(row: Data) -> str:
    return f"{row['mfu']:.1%} MFU" if "mfu" in row else f"{row['tokens_per_second']:.0f} tokens/s"


def _headline_compare(data: Data, earlier: Data) -> str:
    found = []
    for size in data["sizes"]:
        rows = {r["peer"]: r for r in size["peers"] if "seconds" in r}
        before = {r["peer"]: r for s in earlier.get("sizes", []) if s["size"] == size["size"]
                  for r in s["peers"] if "seconds" in r}
        for peer, row in rows.items():
            was = f" (was {_rate(before[peer])})" if peer in before else ""
            note = "" if row["state"] == "counted" else f" [{row['state']}]"
            found.append(f"{peer} {_rate(row)}{was}{note}")
        if "ours_over_fastest_peer" in size:
            ratio = size["ours_over_fastest_peer"]
            found.append(f"ours {ratio['median']:.3f} × {ratio['peer']}")
    return "; ".join(found) or "nothing was timed"


def _headline_profile(data: Data, _: Data) -> str:
    launches = sum(k["calls"] for k in data["kernels"])
    if "device" not in data:
        return f"{data['seconds'] * 1e3:.1f} ms a step, {launches:.0f} operations"
    waits = sum(w["calls"] for w in data["device_syncs"])
    return (f"{data['seconds'] * 1e3:.1f} ms a step, {launches:.0f} kernels, launch gaps "
            f"{data['device']['launch_gaps']:.1%}, {waits} waits")


HEADLINES: dict[str, Callable[[Data, Data], str]] = {
    "calibrate": _headline_calibrate, "train": _headline_train,
    "doctor": _headline_doctor, "kernels": _headline_tests, "engine": _headline_tests, "step": _headline_step,
    "layouts": lambda data, _: f"{len(data['equal'])} equal, {len(data['other'])} differ", "ops": _headline_ops,
    "ops-compile": _headline_ops, "compare": _headline_compare, "profile": _headline_profile,
}


def headline(name: str, data: Data | None, earlier: Data | None = None) -> str:
    """Return one line about what a part measured; ``earlier``: what an earlier session measured in it."""
    if data is None:
        return "no result"
    kind = "compare" if name.startswith("compare-") else name
    try:
        return HEADLINES[kind](data, earlier or {})
    except (KeyError, TypeError, ValueError) as error:
        return f"a result that cannot be read: {type(error).__name__} {error}"


def summary_table(made: Data, earlier: Data) -> str:
    """Return the session as a Markdown table."""
    before = earlier.get("parts", {})
    lines = [f"# GPU session: {made['device']}", "",
             f"{made['time']}, torch {made['torch']}, Python {made['python']}; `{made['command']}`", "",
             "| part | state | s | result |", "|---|---|---|---|"]
    for name, row in made["parts"].items():
        says = headline(name, row.get("data"), (before.get(name) or {}).get("data"))
        lines.append(f"| {name} | {row['state']} | {row['seconds']:.0f} | {says} |")
    return "\n".join(lines) + "\n"
