"""What the parts of a GPU session left in their files, and one line for people about each. Standard library only."""

from __future__ import annotations

import json
import re
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

Data = dict[str, Any]
STATE = "(PASSED|FAILED|ERROR|SKIPPED)"
TEST_LINE = re.compile(rf"(?:\[gw\d+\] \[ *\d+%\] {STATE} )?(tests/\S+::.+?)(?: {STATE}\b.*)?")
"""Of ``pytest -v``, with workers and without."""


def data_of(name: str, folder: Path) -> Data | None:
    """Return what a part measured, as JSON can hold it; None: it left nothing that can be read."""
    try:
        if name in ("kernels", "engine"):
            return _tests(folder / f"{name}.xml", folder / f"{name}.txt")
        if name == "layouts":
            return _layouts((folder / "layouts.txt").read_text())
        if name == "calibrate":
            return {key: (folder / f"calibrated.{key}").read_text() for key in ("toml", "csv")}
        loaded: Data = json.loads((folder / f"{name}.json").read_text())
        return loaded
    except (OSError, ValueError, ElementTree.ParseError):
        return None


def _tests(path: Path, said: Path) -> Data:
    """Counts and failures of pytest's junit file, which it writes at its end; where tests were stopped before, of what
    they ``said`` one by one."""
    if not path.exists():
        return _stopped_tests(said.read_text(errors="replace"))
    suite = next(ElementTree.parse(path).iter("testsuite"))
    counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = {f"{case.get('classname')}.{case.get('name')}": (case.find(kind).get("message") or "")[:300]  # type: ignore[union-attr]
              for case in suite.iter("testcase") for kind in ("failure", "error") if case.find(kind) is not None}
    return {**counts, "failed": failed, "seconds": float(suite.get("time", 0))}


def _stopped_tests(text: str) -> Data:
    """The same of the lines of ``pytest -v``, with or without workers. Raises ValueError where there is none."""
    found = {}
    for line in text.splitlines():
        match = TEST_LINE.fullmatch(line.rstrip())
        if match and (state := match[1] or match[3]):
            found[match[2]] = state
    if not found:
        raise ValueError("no test has ended")
    states = list(found.values())
    return {"tests": len(found), "failures": states.count("FAILED"), "errors": states.count("ERROR"),
            "skipped": states.count("SKIPPED"), "stopped": True,
            "failed": {test: "" for test, how in found.items() if how in ("FAILED", "ERROR")}}


def _layouts(text: str) -> Data:
    """Lines of ``megatron-port parity`` that judge a layout."""
    lines = [line.strip() for line in text.splitlines()]
    return {"equal": [x for x in lines if "EQUAL within tolerance" in x],
            "other": [x for x in lines if re.search(r"\bDIFFER", x)], "end": lines[-12:]}


def _headline_calibrate(data: Data) -> str:
    wanted = ("matmul_scale", "attention_scale", "memory_scale", "matmul_tflops", "memory_bandwidth_gb")
    lines = [line.partition("#")[0].strip() for line in data["toml"].splitlines()]
    return "; ".join(line for line in lines if line.startswith(wanted)) or f"{data['csv'].count(chr(10))} rows"


def _headline_env(data: Data) -> str:
    card = data["hardware"].get("card", {"name": "cpu"})
    limit = f", {card['power_limit_w']:.0f} W" if "power_limit_w" in card else ""
    missing = f"; no clocks: {card['clocks_missing']}" if "clocks_missing" in card else ""
    found = data.get("doctor", {}).get("findings")
    bad = [f"{f['name']}: {f['value']}" for f in found or () if f["status"] in ("wrong", "slow")]
    says = "doctor did not answer" if found is None else "; ".join(bad[:3])[:300] or "nothing wrong"
    return f"{card['name']}{limit}{missing}; {says}"


def _headline_recorded(data: Data) -> str:
    if "differences" not in data:
        return str(data.get("stopped", "nothing was compared"))
    says = "; ".join(data["differences"]) or "equal bits"
    if data.get("differences_call_by_call"):
        says += " (and so do two runs call by call)"
    times = {name: statistics.median(row["seconds"]) for name, row in data["peers"].items() if "seconds" in row}
    if len(times) == 2:
        called, replayed = times["ours"], times["ours-recorded"]
        says += f"; {called * 1e3:.2f} ms call by call, {replayed * 1e3:.2f} replayed ({called / replayed - 1:+.1%})"
    return says


def _headline_epilogues(data: Data) -> str:
    found = [f"{name}: {case['saved_ms']:.2f} of {case['expected_ms']:.2f} ms a step"
             for name, case in data["decision"]["cases"].items()]
    failed = [f"{row['kind']} failed: {row['failed'][:80]}" for row in data["rows"] if row["failed"]]
    return "; ".join(["go" if data["decision"]["go"] else "no-go", *found, *failed])


def _headline_tests(data: Data) -> str:
    passed = data["tests"] - data["failures"] - data["errors"] - data["skipped"]
    bad = f"; failed: {', '.join(list(data['failed'])[:4])}" if data["failed"] else ""
    cut = "; stopped before the end" if data.get("stopped") else ""
    return f"{passed} passed, {data['skipped']} skipped{bad}{cut}"


def _headline_train(data: Data) -> str:
    return (f"loss {data['first_loss']:.2f} to {data['last_loss']:.2f} in {len(data['steps'])} steps, resumed at "
            f"{data['resumed_at']}, {data['tokens_per_second']:,.0f} tokens/s")


def _headline_ops(data: Data) -> str:
    shares, slower, bound = [], [], 0
    for op in data["ops"]:
        for kind in ("forward", "both"):
            ms, host = op[f"{kind}_ms"], op[f"{kind}_host_ms"]
            if "own" in ms:
                shares.append(op[f"{kind}_share"])
                bound += host["own"] > ms["own"]
                if "eager" in ms and ms["own"] > ms["eager"]:
                    slower.append(f"{op['name']} {op['shape']} {kind} {ms['own'] / ms['eager']:.2f}")
    if not shares:
        return "no own kernel ran"
    middle = sorted(shares)[len(shares) // 2]
    worse = f"; slower than eager: {', '.join(slower[:4])}{' …' if len(slower) > 4 else ''}" if slower else ""
    return (f"copy {data['hardware']['copy_gb_s']:.0f} GB/s; of it {min(shares):.0%} to {max(shares):.0%}, median "
            f"{middle:.0%}; launch-bound {bound} of {len(shares)}{worse}")


def _rate(row: Data) -> str:
    return f"{row['mfu']:.1%} MFU" if "mfu" in row else f"{row['tokens_per_second']:.0f} tokens/s"


def _headline_compare(data: Data) -> str:
    found = []
    for size in data["sizes"]:
        for row in size["peers"]:
            note = "" if row["state"] == "counted" else f" [{row['state']}]"
            found.append(f"{row['peer']} {_rate(row)}{note}" if "seconds" in row else f"{row['peer']}{note}")
        if "ours_over_fastest_peer" in size:
            ratio = size["ours_over_fastest_peer"]
            found.append(f"ours {ratio['median']:.3f} × {ratio['peer']}")
    return "; ".join(found)


def _profiled(data: Data) -> str:
    launches = sum(k["calls"] for k in data["kernels"])
    says = f"{data['size']} {data['seconds'] * 1e3:.1f} ms a step, {launches:.0f} "
    if "device" not in data:
        return says + "operations"
    waits = sum(w["calls"] for w in data["device_syncs"])
    return f"{says}kernels, launch gaps {data['device']['launch_gaps']:.1%}, {waits} waits"


def _headline_profile(data: Data) -> str:
    return "; ".join(map(_profiled, data["profiles"])) or "nothing was profiled"


HEADLINES: dict[str, Callable[[Data], str]] = {
    "env": _headline_env, "recorded": _headline_recorded, "epilogues": _headline_epilogues,
    "calibrate": _headline_calibrate, "train": _headline_train, "kernels": _headline_tests, "engine": _headline_tests,
    "layouts": lambda data: f"{len(data['equal'])} equal, {len(data['other'])} differ", "ops": _headline_ops,
    "compare": _headline_compare, "profile": _headline_profile, "experts": _headline_profile,
}


def headline(name: str, data: Data | None) -> str:
    """Return one line about what a part measured."""
    if data is None:
        return "no result"
    kind = "compare" if name.startswith("compare-") else name
    try:
        return HEADLINES[kind](data)
    except (KeyError, TypeError, ValueError) as error:
        return f"a result that cannot be read: {type(error).__name__} {error}"


def summary_table(made: Data) -> str:
    """Return the session as a Markdown table."""
    lines = [f"# GPU session: {made['device']}", "",
             f"{made['time']}, torch {made['torch']}, Python {made['python']}; `{made['command']}`", "",
             "| part | state | s | result |", "|---|---|---|---|"]
    for name, row in made["parts"].items():
        says = headline(name, row.get("data"))
        lines.append(f"| {name} | {row['state']} | {row['seconds']:.0f} | {says} |")
    return "\n".join(lines) + "\n"
