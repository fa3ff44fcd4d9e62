"""What a run was made with, for its report: ``environment.json``, and the attempts in ``events.jsonl``.

Written by rank 0 alone. A file that cannot be written is passed over: the run matters more.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import sys
import time
from typing import Any

from megatron_port import __version__
from megatron_port.core.config.config_hash import config_hash
from megatron_port.core.dist.launchers import attempt_name
from megatron_port.core.dist.rank import LeaseLost
from megatron_port.core.io.files import write_bytes
from megatron_port.core.io.logging import redact
from megatron_port.core.package import package_versions
from megatron_port.core.train.folders import run_folder
from megatron_port.core.train.hooks import Session
from megatron_port.run.run_files import add_event

ENVIRONMENT = "environment.json"
PACKAGES = ("torch", "deepspeed", "numpy", "safetensors", "tiktoken", "tokenizers", "flash-attn", "apex")
MESSAGE_CHARACTERS = 500


def environment(session: Session) -> dict[str, Any]:
    """Return versions, device, ranks and providers, as JSON types; what is not known has no entry."""
    from megatron_port.tools.launch.snapshot import commit  # rank 0 alone

    versions = {
        "python": platform.python_version(), "megatron_port": __version__, **package_versions(PACKAGES),
    }
    t, info = session.ctx.topology, session.info
    kind, name = session.device.kind, session.device.name
    device = kind if name in ("", kind) else f"{kind}: {name}"
    found = {
        "time": time.time(), "commit": commit(), "command": redact(shlex.join(["megatron-port", *sys.argv[1:]])),
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}", "cpus": os.cpu_count(),
        "device": device, "ranks": info.world_size,
        "launcher": info.launcher, "attempt": attempt_name(),
        "layout": t.sizes(), "versions": versions,
        "providers": session.providers.describe(),
    }
    return {key: value for key, value in found.items() if value not in ("", None)}


def record_start(session: Session, step: int) -> None:
    """Write ``environment.json`` and the ``start`` event of this attempt, which begins after ``step`` steps."""
    if not session.is_rank_zero:
        return
    made = environment(session)
    with contextlib.suppress(OSError):
        write_bytes(run_folder(session.config) / ENVIRONMENT, (json.dumps(made, indent=2) + "\n").encode())
    about = {key: made[key] for key in ("host", "ranks", "layout", "attempt", "commit") if key in made}
    record_event(session, "start", step, **about)


def record_event(session: Session, event: str, step: int, **more: object) -> None:
    """Append a line with the run's id to ``events.jsonl`` on rank 0; nothing once another attempt holds the folder."""
    if not session.is_rank_zero:
        return
    fence = session.fence
    with contextlib.suppress(LeaseLost, OSError):
        fence.check()
        of = {"run": fence.run} if fence.run else {"config_hash": config_hash(session.config)}
        add_event(run_folder(session.config), {"event": event, "step": step, **of, **more})


def record_failure_event(session: Session, error: BaseException) -> None:
    """Append the ``failed`` event: what ended this attempt, as rank 0 saw it.

    One that failed before it was known to be of the folder's run says which settings it had; a report shows it only
    if the run has the same.
    """
    text = redact(f"{type(error).__name__}: {error}")
    record_event(session, "failed", session.progress.step, message=text[:MESSAGE_CHARACTERS])
