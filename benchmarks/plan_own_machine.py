"""Plans beside the steps that this project measured on a GPU in its own sessions: seconds and peak memory.

    python -m benchmarks.plan_own_machine [--machine calibrated.toml]

The steps are those of ``compare`` in benchmarks/results/gpu-session-nvidia-h200.json. Writes
benchmarks/results/plan-own-machine.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.compare.predict import predict
from megatron_port.core.io.files import write_text

RESULTS = Path(__file__).resolve().parent / "results"
SESSION, PAGE, CLUSTER = RESULTS / "gpu-session-nvidia-h200.json", RESULTS / "plan-own-machine.md", "clusters/h200"


def rows(machine: str = CLUSTER) -> list[dict[str, Any]]:
    """Each step that the session measured, and its plan on a cluster (``compare.predict``)."""
    parts = json.loads(SESSION.read_text())["parts"].values()
    return [row for part in parts if "sizes" in (part["data"] or {}) for row in predict(part["data"], Path(machine))]


def page(found: list[dict[str, Any]]) -> str:
    """The table."""
    lines = [
        "# Plans beside own measurements on a GPU", "",
        f"Written by `python -m benchmarks.plan_own_machine` from `{SESSION.name}`, planned with `{CLUSTER}`.", "",
        "| step | planned, ms | measured, ms | | planned, GB | measured, GB | |", "|---|---|---|---|---|---|---|",
    ]
    for r in found:
        memory = r["predicted_bytes"] / r["measured_bytes"] - 1
        lines.append(
            f"| {r['run']} | {1e3 * r['predicted_seconds']:.1f} | {1e3 * r['measured_seconds']:.1f} | "
            f"{r['time_error']:+.1%} | {r['predicted_bytes'] / 1e9:.2f} | {r['measured_bytes'] / 1e9:.2f} | "
            f"{memory:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the table; write it where the cluster is the shipped one."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_own_machine", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--machine", default=CLUSTER, help="another description, e.g. what bench calibrate wrote")
    args = parser.parse_args()
    text = page(rows(args.machine))
    if args.machine == CLUSTER:
        write_text(PAGE, text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
