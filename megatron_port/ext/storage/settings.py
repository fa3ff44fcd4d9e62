"""Settings that contradict the recovery of lost ranks (``launch.when_lost``) and copies on disks."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_port.core.config.conflicts import Rule, Table, native_only


def _inside(folder: str, *places: str) -> bool:
    path = Path(os.path.normpath(folder))
    return any(Path(os.path.normpath(place)) in (path, *path.parents) for place in places)


RECOVERY = (Table(asked='launch.when_lost "replace"', on=lambda c: c.launch.when_lost == "replace", rows=(
    native_only("which keeps a process's groups and state beyond a run", 'use engine = "native", or when_lost "stop"'),
    Rule(lambda c: not c.watch.enabled,
         "{asked} with watch.enabled false: nothing would see a rank that hangs; leave the watch on"),
    Rule(lambda c: not c.checkpoint.memory_interval and not c.checkpoint.save_interval,
         "{asked} without copies and checkpoints: every loss would begin the run again; set "
         "checkpoint.memory_interval = 1"),
)), Table(asked="checkpoint.disk_interval", on=lambda c: c.checkpoint.disk_interval > 0, rows=(
    Rule(lambda c: not c.checkpoint.memory_interval or c.checkpoint.disk_interval % c.checkpoint.memory_interval,
         "{asked} is no multiple of checkpoint.memory_interval, and copies on disks are made of those in memory; set "
         "memory_interval = 1"),
    Rule(lambda c: _inside(c.checkpoint.disk_folder, c.checkpoint.memory_folder, "/dev/shm", "/run"),
         "{asked} with checkpoint.disk_folder {c.checkpoint.disk_folder}, where copies in memory are: what takes those "
         "would take these; name a folder on a disk of each node, or set disk_interval = 0"),
)), Table(asked="watch.replace_percent", on=lambda c: c.watch.replace_percent > 0, rows=(
    Rule(lambda c: c.launch.when_lost != "replace",
         '{asked} with launch.when_lost "stop": nothing would replace a slow rank; set when_lost = "replace"'),
    Rule(lambda c: not 0 < c.watch.straggler_percent <= c.watch.replace_percent,
         "{asked} is below watch.straggler_percent, at which ranks are named, or none are; set it to at least that"),
)))
