"""What the planner says of the sizes that a comparison measured, on the machine that ``bench calibrate`` described.

    python -m benchmarks.compare.predict compare.json calibrated.toml --out predicted.json

Layers without embedding, head and optimizer are not planned: the planner plans whole steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.compare.results import write
from benchmarks.compare.run import ours
from benchmarks.compare.sizes import sizes
from benchmarks.compare.worker import settled
from megatron_port.core.config.loader import load
from megatron_port.core.errors import PortError
from megatron_port.tools.plan.case import case_of, machine_of
from megatron_port.tools.plan.memory import stage_memory
from megatron_port.tools.plan.step import plan_step


def predict(found: dict[str, Any], machine_file: Path) -> list[dict[str, Any]]:
    """A row for each size with a measured row of this project. Raises ConfigError where a step cannot be planned."""
    described = load(str(machine_file)).config
    rows = []
    for measured in found["sizes"]:
        own = [p for p in measured["peers"] if ours(p["peer"]) and "seconds" in p]
        if measured["layers_only"] or not own:
            continue
        changes = {"layers": measured["model"]["num_layers"], "seq": measured["model"]["seq_length"],
                   "micro_batch": measured["micro_batch"], "global_batch": measured["global_batch"]}
        size = settled(sizes()[measured["size"]], changes)
        config = replace(size.run_config(), cluster=replace(described.cluster, nodes=0), hardware=described.hardware,
                         calibration=described.calibration, backend=described.backend)
        machine, (case, _) = machine_of(config), case_of(config, 1)
        plan, memory = plan_step(case, machine), stage_memory(case, machine, 0)
        best = min(own, key=lambda p: p["seconds"]["median"])
        seconds = best["seconds"]["median"]
        rows.append({
            "size": size.name, "peer": best["peer"],
            "run": f"{size.about}; {case.model.num_layers} layers, {case.micro_batches} micro-batches of "
                   f"{case.micro_batch} x {case.model.seq_length:,} tokens",
            "predicted_seconds": plan.seconds, "measured_seconds": seconds,
            "measured_cpu_seconds": best["cpu_seconds"]["median"], "time_error": plan.seconds / seconds - 1,
            "predicted_bytes": memory.allocated,
            "measured_bytes": best["peak_memory_bytes"], "predicted_parts": plan.split.parts(),
        })
    return rows


def main(argv: list[str] | None = None) -> int:
    """Read, plan, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare.predict", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="file that python -m benchmarks.compare --out wrote")
    parser.add_argument("machine", type=Path, help="file that megatron-port bench calibrate wrote")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    try:
        rows = predict(json.loads(args.measured.read_text()), args.machine)
    except PortError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for row in rows:
        print(f"{row['size']}: planned {row['predicted_seconds'] * 1e3:.4g} ms per step, measured "
              f"{row['measured_seconds'] * 1e3:.4g} ({row['time_error']:+.0%}); memory planned "
              f"{row['predicted_bytes'] / 1e6:.4g} MB, measured {row['measured_bytes'] / 1e6:.4g}")
    if args.out:
        write(args.out, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
