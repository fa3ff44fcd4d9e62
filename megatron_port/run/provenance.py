"""Which run a folder is of. ``run.json`` holds its id; every checkpoint, event and lease of the run carries it.

A run begins where training begins: at step 0, or at a checkpoint of another run that ``checkpoint.resume = PATH``
names. It is kept through every resume from its own checkpoints, whatever the layout, the number of ranks and the
settings.
All functions here are for rank 0, with the folder's lease held.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_port import __version__
from megatron_port.core.checkpoint.format import Manifest, Parent
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.rank import Fence, LeaseLost
from megatron_port.core.errors import CheckpointError
from megatron_port.core.io.files import write_bytes
from megatron_port.core.io.logging import redact
from megatron_port.core.io.typed_json import Seconds, read_optional
from megatron_port.core.package import package_versions
from megatron_port.core.train.folders import run_folder
from megatron_port.core.train.hooks import Session
from megatron_port.ext.telemetry.metrics import DECLARED_FILE as DECLARED
from megatron_port.run.config_hash import config_hash
from megatron_port.run.launchers import attempt_name
from megatron_port.run.run_files import IDENTITY, PREVIOUS, add_event

# What a run was made with, for its report: ``environment.json``, and the attempts in ``events.jsonl``.
#
# Written by rank 0 alone. A file that cannot be written is passed over: the run matters more.

ENVIRONMENT = "environment.json"
PACKAGES = ("torch", "deepspeed", "numpy", "safetensors", "tiktoken", "tokenizers", "flash-attn", "apex")
MESSAGE_CHARACTERS = 500


def environment(session: Session) -> dict[str, Any]:
    """Return versions, device, ranks and providers, as JSON types; what is not known has no entry."""
    from megatron_port.run.sources import commit  # rank 0 alone

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


RECORDS = ("metrics.jsonl", "experts.jsonl", "events.jsonl", "ranks.jsonl", "outcome.json", "environment.json",
           "config.toml", "routes", DECLARED, IDENTITY)
"""Files that a run leaves beside its checkpoints; put aside when another run begins in its folder."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Contents of ``run.json``."""

    id: str
    name: str = ""
    config_hash: str = ""
    """Configuration hash of the latest attempt that trained."""
    begun: Seconds = 0.0
    """Seconds since 1970; for people."""
    origin: dict[str, Any] | None = None
    """Run, commit and step of the other run's checkpoint that it began at; None: at step 0."""


def _check_id(run: str, where: Path) -> None:
    """Raise CheckpointError where an id is no name of a folder of its own: records are moved to ``previous/ID``."""
    if run in (".", "..") or len(run) > 200 or "\0" in run or Path(run).name != run:
        raise CheckpointError(f"{where}: the run's id is {run!r:.80}, which is no name of a folder; nothing was moved. "
                              "Remove the file, or name another output folder")


def read_identity(run_folder: Path) -> Identity | None:
    """Return the identity of a folder's run; None: no run has begun there, or its file cannot be read.

    Raises CheckpointError: its id is no name of a folder.
    """
    return _identity(run_folder)[0]


def _identity(run_folder: Path) -> tuple[Identity | None, str]:
    """Return :func:`read_identity`'s, and what is wrong with a file that cannot be read."""
    made, wrong = read_optional(run_folder / IDENTITY, Identity)
    if made is None or not made.id:
        return None, wrong
    _check_id(made.id, run_folder / IDENTITY)
    return made, ""


def own_checkpoints(
    run_folder: Path, config: RunConfig, found: list[tuple[Path, Manifest]], note: Any
) -> list[tuple[Path, Manifest]]:
    """Return those of ``found`` (newest first) that this run may resume from under ``checkpoint.resume = "auto"``.

    Checkpoints of versions without run ids count as its own. A folder without a ``run.json`` takes over the run of its
    newest checkpoint if that was saved under the same name.

    Raises:
        CheckpointError: all are of other runs.
    """
    known, wrong = _identity(run_folder)
    if wrong:
        note(f"{wrong}; " + ("the run is taken to be that of the newest checkpoint" if found else
                             "this is a new run, beside whose records those of the former stay"))
    if not found:
        return []
    run = known.id if known is not None else ""
    if known is None:
        newest = found[0][1]
        if newest.lineage.run and _name_in(newest) in ("", config.name):
            run = newest.lineage.run
    own = [(path, m) for path, m in found if m.lineage.run in ("", run)]
    others = [(path, m) for path, m in found if m.lineage.run not in ("", run)]
    if not own:
        path, manifest = others[0]
        whose = f', "{_name_in(manifest)}"' if _name_in(manifest) else ""
        raise CheckpointError(
            f"{path} was saved by another run{whose} (id {manifest.lineage.run}; this folder is of "
            f"{run or 'none yet'}), and so were all {len(others)} checkpoints here: they are not resumed under the "
            f'name "{config.name}". To start this run from that one, give it explicitly: checkpoint.resume = "{path}" '
            f'(moments and counters too) or checkpoint.initial_weights = "{path}" (weights only); to start afresh, '
            'checkpoint.resume = "never"'
        )
    for path, manifest in others:
        note(f"passing over {path.name}: it is of another run (id {manifest.lineage.run}; this one is {run})")
    return own


def _name_in(manifest: Manifest) -> str:
    saved = manifest.state.config
    name = saved.get("name", "") if isinstance(saved, dict) else ""
    return name if isinstance(name, str) else ""


def settle(
    run_folder: Path, config: RunConfig, begun_at: Manifest | None, fence: Fence, *, path: Path | None = None,
    recovers: bool = False,
) -> Identity:
    """Decide which run this attempt belongs to, write ``run.json``, and hand the id to the fence.

    Records of a run that was in the folder before are moved to ``previous/ID``.

    Args:
        begun_at: manifest of the checkpoint that was loaded; None: training begins at step 0.
        path: of that checkpoint, where ``checkpoint.resume`` may have named it.
        recovers: the job has trained here before, and lost a rank.

    Raises:
        CheckpointError: the id of the run, by its record or by the checkpoint, is no name of a folder.
        LeaseLost: the folder is another attempt's by now.
        OSError: the file system refused.
    """
    known = read_identity(run_folder)
    inside = path is not None and path.resolve().is_relative_to(run_folder.resolve())
    found = known if recovers and known is not None else _decide(known, config, begun_at, inside=inside)
    fence.check()
    _check_id(found.id, path or run_folder)
    if known is not None and known.id != found.id:
        _put_aside(run_folder, known.id)
    run_folder.mkdir(parents=True, exist_ok=True)
    if found != known:
        write_bytes(run_folder / IDENTITY, (json.dumps(asdict(found), indent=1) + "\n").encode())
    fence.run = found.id
    return found


def _decide(known: Identity | None, config: RunConfig, begun_at: Manifest | None, *, inside: bool) -> Identity:
    """Decide which run this attempt belongs to. ``inside``: the checkpoint is in the run's own folder."""
    digest, resume = config_hash(config), config.checkpoint.resume
    new = Identity(id=secrets.token_hex(8), name=config.name, config_hash=digest, begun=time.time())
    again = replace(known, name=config.name, config_hash=digest) if known is not None else None
    unchanged = again == known
    if begun_at is None:
        # An attempt that ended before its first checkpoint is tried again; other settings make another run.
        fresh = again is not None and again.origin is None and resume != "never"
        return again if again is not None and fresh and unchanged else new
    lineage = begun_at.lineage
    own = resume == "auto" or (inside and not lineage.run) or (again is not None and lineage.run == again.id)
    if own:
        return again or replace(new, id=lineage.run or new.id)
    origin = asdict(Parent(run=lineage.run, commit=lineage.commit, step=begun_at.state.step))
    if again is not None and again.origin == origin and unchanged:
        return again
    return replace(new, origin=origin)


def _put_aside(run_folder: Path, run: str) -> None:
    """Move the records of the run that was here; an earlier copy of the same name is kept beside."""
    place, number = run_folder / PREVIOUS / run, 1
    while place.exists():
        number += 1
        place = run_folder / PREVIOUS / f"{run}-{number}"
    place.mkdir(parents=True)
    for name in RECORDS:
        with contextlib.suppress(FileNotFoundError):
            os.rename(run_folder / name, place / name)
