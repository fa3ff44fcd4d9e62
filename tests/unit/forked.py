"""Scripts that each want an interpreter of their own, without the seconds that importing torch takes.

A :class:`ForkServer` runs a preamble once and a copy of itself for each script, so what a script patches or imports is
gone with it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 280


class ForkServer:
    """An interpreter that has run ``preamble``; its names are there for every script."""

    def __init__(self, preamble: str, **environment: str) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
        self._process = subprocess.Popen(
            [sys.executable, __file__, preamble], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, code: str, path: Path | None = None) -> str:
        """What a script prints. ``path``: comes first on its ``sys.path``.

        Raises:
            AssertionError: it ended with another code than 0; the message is the end of its output.
        """
        assert self._process.stdin and self._process.stdout
        with tempfile.TemporaryDirectory(prefix="forked-") as folder:
            out = Path(folder) / "out"
            self._process.stdin.write(json.dumps([code, str(path or ""), str(out)]) + "\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], TIMEOUT_S)[0]:
                self.close()
                raise AssertionError(f"the script ran for more than {TIMEOUT_S} s")
            answer = self._process.stdout.readline()
            said = out.read_text() if out.exists() else "the preamble failed, see above"
        assert answer == "0\n", said[-3000:]
        return said

    def close(self) -> None:
        """End the server and, where one still runs, its script."""
        self._process.kill()
        self._process.communicate()


def _run(names: dict[str, object], code: str, path: str, out: str) -> int:
    """Run a script in this process; its exit code."""
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.path[:0] = [path] if path else []
    try:
        exec(compile(code, "<script>", "exec"), names)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _serve() -> None:
    """Fork a child for each line of JSON on stdin; answer with its exit code."""
    import ctypes
    import signal

    answers, sys.stdout = sys.stdout, sys.stderr
    sys.path.pop(0)  # this folder
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(sys.argv[1], "<preamble>", "exec"), names)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not outlive the server
            sys.stdout = sys.stderr
            os._exit(_run(names, *json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
