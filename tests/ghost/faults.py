"""Plant each fault of ``faults.toml`` in a copy of the package, run it on the ghost machine, and see it found.

    python tests/ghost/faults.py [--python ENV/bin/python] [--only event]

The same run without the fault must show none. A line per fault in benchmarks/results/ghost-faults.jsonl. Exit 1 where a
fault is not found, or something is found without one.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from analyse import faults
from check import RUN
from machine import Machine
from options import HERE, ROOT, chosen_torch, commit, machine, parser

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

RECORD = ROOT / "benchmarks" / "results" / "ghost-faults.jsonl"
LIMIT_S = 90.0
"""For one run; a fault that makes ranks wait for ever costs all of it."""


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in a file of the package; ``says``: what the analysis must then find."""

    name: str
    file: str
    old: str
    new: str
    layout: str
    set: list[str]
    says: str

    def plant(self, package: Path) -> None:
        """Change the file of a copy. Raises ValueError unless ``old`` is there exactly once."""
        path = package / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} is {text.count(self.old)} times in {self.file}")
        path.write_text(text.replace(self.old, self.new))

    def argv(self) -> list[str]:
        """Return the command that runs it."""
        tp, pp, dp = map(int, self.layout.split("x"))
        sets = [f"layout.tensor_parallel_size={tp}", f"layout.pipeline_parallel_size={pp}",
                f"model.num_layers={2 * pp}", f"batch.global_batch_size={2 * dp}", *self.set]
        return ["train", "run.toml", "--nproc", str(tp * pp * dp), *(w for s in sets for w in ("--set", s))]


def planned() -> list[Fault]:
    """Return the list."""
    return [Fault(**row) for row in tomllib.loads((HERE / "faults.toml").read_text())["fault"]]


def found_in(made: Machine, fault: Fault) -> list[str]:
    """Run and analyse."""
    shutil.rmtree(made.scratch / "runs", ignore_errors=True)
    (made.scratch / "run.toml").write_text(RUN)
    ended = made.run(*fault.argv(), seconds=LIMIT_S)
    most = None if any("offload" in setting for setting in fault.set) else 1
    found = faults(ended.logs, most_waits=most)
    return found if found or not ended.code else [f"exit {ended.code}: {ended.output[-600:]}"]


def main() -> int:
    """Run the faults; 1 where one is not found."""
    made = parser(__doc__)
    made.add_argument("--only", default="", help="faults whose name contains this")
    a = made.parse_args()
    torch, bad = chosen_torch(a.python), 0
    rows = {row["fault"]: row for row in map(json.loads, RECORD.read_text().splitlines() if RECORD.exists() else ())}
    wanted = [fault for fault in planned() if a.only in fault.name]
    with machine(torch) as node:
        clean = {fault.name: found_in(node, fault) for fault in wanted}
    for fault in wanted:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(ROOT / "megatron_port", Path(folder) / "megatron_port")
            fault.plant(Path(folder) / "megatron_port")
            with machine(torch, tree=Path(folder)) as node:
                found = found_in(node, fault)
        match = [text for text in found if re.search(fault.says, text)]
        good = bool(match) and not clean[fault.name]
        rows[fault.name] = {"fault": fault.name, "file": fault.file, "found": good, "says": (match or found)[:2],
                            "without": clean[fault.name][:2], "commit": commit(), "torch": torch.version}
        print(json.dumps(rows[fault.name]), flush=True)
        RECORD.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
        bad += not good
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
