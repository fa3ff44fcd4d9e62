"""The ghost machine's front end: a process that has imported torch and the package, and forks a program a request.

Importing takes several seconds of processor time, a fork some milliseconds. A request is a line of JSON on standard
input: ``argv`` (a module's name or a script's path, then its arguments), ``folder``, ``settings`` (environment),
``output`` (a file), ``seconds``. The answer, a line on standard output: the exit ``code`` (124: it ran past its
seconds) and ``cpu_s``, the processor seconds of the program and its children. machine.py starts it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import torch
from answers import GHOST, Answers, use_kernels
from ordering import PEAK, STEP_BEGINS, STEP_ENDS
from torch.nn.attention import SDPBackend

import megatron_port
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.layers import linear as linear_kernels
from megatron_port.ext.kernels import attention_choice as attention


def program(argv: list[str]) -> None:
    """Run a module or a script as ``python`` would, with torch's operators computed where the machine computes."""
    sys.argv = argv
    as_on_a_gpu()
    if os.environ.get("GHOST_COMPUTE") == "1":
        Answers().__enter__()  # until the process ends: what runs on the way out launches kernels too
    if argv[0].endswith(".py"):
        sys.path.insert(0, str(Path(argv[0]).parent))
        runpy.run_path(argv[0], run_name="__main__")
    else:
        mark_steps()
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def as_on_a_gpu() -> None:
    """Let attention be what a GPU without cuDNN takes, which cannot be loaded here, and products add to wide sums: the
    package's own test of that looks at a value, of which there is none unless the machine computes."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    if os.environ.get("GHOST_COMPUTE") != "1":
        linear_kernels.widening_addmm = lambda *_: True  # type: ignore[assignment, attr-defined]
    found = attention.gpu_kernels  # type: ignore[attr-defined]
    attention.gpu_kernels = (  # type: ignore[attr-defined]
        lambda **about: [k for k in found(**about) if k is not SDPBackend.CUDNN_ATTENTION]
    )


def import_all() -> None:
    """Import what a program may need: no fork has to. DeepSpeed, which looks for devices, is left to those that do."""
    for name in ("torch._dynamo", "torch.distributed.checkpoint"):
        import_module(name)
    for module in walk_packages(megatron_port.__path__, "megatron_port."):
        if "deepspeed" not in module.name and not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # of something that this environment has not
                import_module(module.name)


def mark_steps() -> None:
    """Leave a mark in the log where a training step of the native engine begins and ends, and its allocator's peak."""
    train_step = NativeEngine.train_step

    def marked(*args: Any, **kwargs: Any) -> Any:
        gpu = torch.cuda.is_initialized()
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        GHOST.ghost_mark(STEP_BEGINS.encode())
        try:
            return train_step(*args, **kwargs)
        finally:
            GHOST.ghost_mark(STEP_ENDS.encode())
            if gpu:
                GHOST.ghost_mark(f"{PEAK}{torch.cuda.max_memory_allocated()}".encode())

    NativeEngine.train_step = marked  # type: ignore[method-assign]


def child(request: dict[str, Any]) -> int:
    """Become the program in a session of its own; return its exit code."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.update(request["settings"])
    output = os.open(request["output"], os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
    for target in (1, 2):
        os.dup2(output, target)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    gc.enable()
    try:
        program(request["argv"])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def wait(pid: int, seconds: float) -> tuple[int, float]:
    """Exit code and processor seconds of a child; its whole session is killed after ``seconds``."""
    ends = time.monotonic() + seconds
    late = False
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            code = 124 if late else os.waitstatus_to_exitcode(status)
            return code, usage.ru_utime + usage.ru_stime
        if not late and time.monotonic() > ends:
            late = True
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.01)


def main() -> None:
    """Import, then answer until standard input ends."""
    if library := os.environ.get("GHOST_KERNELS"):
        use_kernels(Path(library))
    import_all()
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = child(json.loads(line))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code, cpu_s = wait(pid, json.loads(line)["seconds"])
        print(json.dumps({"code": code, "cpu_s": round(cpu_s, 2)}), flush=True)


if __name__ == "__main__":
    main()
