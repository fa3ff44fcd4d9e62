"""Skips what this machine cannot run, with the reason."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest


def _no_gpu() -> str:
    """Why the tests marked gpu cannot run, or nothing."""
    import torch

    return "" if torch.cuda.is_available() else "no GPU that torch can use"


def _no_slurm() -> str:
    """Why the tests marked slurm cannot run, or nothing."""
    lacking = [name for name in ("sbatch", "slurmctld", "slurmd", "munged") if not shutil.which(name)]
    if lacking:
        return f"no {', '.join(lacking)} here (apt-get install slurm-wlm munge iproute2)"
    return "" if os.geteuid() == 0 else "starting a private SLURM needs root"


def _not_slow() -> str:
    """Why the tests marked slow do not run, or nothing."""
    return "" if os.environ.get("SLOW") == "1" else "longer than a minute; SLOW=1 runs it"


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for marker, reason_of in (("gpu", _no_gpu), ("slurm", _no_slurm), ("slow", _not_slow)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = reason_of() if marked else ""
        for item in marked if reason else []:
            item.add_marker(pytest.mark.skip(reason=reason))
