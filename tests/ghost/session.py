"""Rehearse ``scripts/gpu_session.sh`` on the ghost machine, to its end: every part's file is to be there.

    python tests/ghost/session.py [--python ENV/bin/python] [--minutes 10] [--only kernels step]

The session's own script runs as on a GPU, at tiny sizes and with numbers (answers.py): torch's operators and the own
kernels compute, so that its checks against fp64 and against the CPU mean what they say. Times mean nothing. The
environment needs pytest besides what training needs. Exit 1: a part left no file, or a check failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from environment import Torch
from options import HERE, ROOT, built_for, chosen_torch, commit, parser

RECORD = ROOT / "benchmarks" / "results" / "ghost-session.json"


def environment(torch: Torch, scratch: Path) -> dict[str, str]:
    """Return the variables under which a program sees the ghost machine, numbers included."""
    built = built_for(torch)
    paths = [str(HERE / "autoload"), str(ROOT)]
    return {
        **os.environ, "LD_PRELOAD": str(built / "libghost.so"), "LD_LIBRARY_PATH": str(built),
        "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "GHOST_DEVICES": "1", "GHOST_COMPUTE": "1",
        "GHOST_CPU_DRAWS": "1",
        "GHOST_KERNELS": str(built / "kernels" / "libmp_cuda.so"), "GHOST_MEETING": str(scratch),
    }


def main() -> int:
    """Run the session; print what each part says and record it."""
    made = parser(__doc__)
    made.add_argument("--minutes", type=float, default=10.0, help="of it all")
    made.add_argument("--out", type=Path, default=ROOT / "runs" / "ghost-session")
    made.add_argument("--only", nargs="+", default=[], metavar="PART")
    made.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    a = made.parse_args()
    torch = chosen_torch(a.python)
    command = [str(ROOT / "scripts" / "gpu_session.sh"), "--tiny", "--minutes", f"{a.minutes:g}", "--out", str(a.out)]
    with tempfile.TemporaryDirectory() as scratch:
        variables = environment(torch, Path(scratch)) | {"PYTHON": str(torch.python)}
        began = time.monotonic()
        code = subprocess.run([*command, *(["--only", *a.only] if a.only else [])], env=variables).returncode
    seconds = round(time.monotonic() - began)
    (path,) = a.out.glob("gpu-session-*.json")
    parts = json.loads(path.read_text())["parts"]
    empty = [name for name, row in parts.items() if row["data"] is None]
    row = {"seconds": seconds, "exit": code, "without_a_file": empty, "commit": commit(), "torch": torch.version,
           "parts": {name: {key: row[key] for key in ("state", "seconds")} for name, row in parts.items()}}
    print(json.dumps(row, indent=1))
    if a.record:
        RECORD.write_text(json.dumps(row, indent=1) + "\n")
    return int(bool(code or empty))


if __name__ == "__main__":
    sys.exit(main())
