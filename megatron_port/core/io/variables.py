"""Environment variables that are read by name: a job's settings, a node's name and CPU level, a shell's completion."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

COMMUNICATION = ("FI_", "NCCL_", "RCCL_", "HSA_", "GLOO_", "UCX_", "MIOPEN_")
"""Prefixes of the variables that decide how ranks talk to each other."""
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables by which a launcher restricts a task to some devices."""
CPU_LEVEL = "MEGATRON_PORT_CPU_LEVEL"
"""The level of the own CPU library to load, v2, v3 or v4; without it, the best that the processor has."""


def variables(names: Sequence[str] = (), prefixes: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that are set and are named, or begin with one of ``prefixes``."""
    return {k: v for k, v in sorted(os.environ.items()) if k in names or k.startswith(tuple(prefixes))}


def cpu_level() -> str:
    """Return the level of :data:`CPU_LEVEL`, empty where none is asked for."""
    return os.environ.get(CPU_LEVEL, "")


def completing() -> bool:
    """Return whether a shell runs this process to complete a line (argcomplete's protocol)."""
    return "_ARGCOMPLETE" in os.environ


def line_to_complete() -> str:
    """Return the line that a shell completes."""
    return os.environ.get("COMP_LINE", "")


def handed_files() -> dict[str, str]:
    """Return the run file that a job script has read for its ranks: path → content; empty without one.

    Thousands of ranks then open no file for it (``launch/common.sh``).
    """
    given = variables(("MEGATRON_PORT_CONFIG", "MEGATRON_PORT_CONFIG_FILE"))
    path, text = given.get("MEGATRON_PORT_CONFIG_FILE", ""), given.get("MEGATRON_PORT_CONFIG", "")
    return {path: text} if path and text else {}


def node_name() -> str:
    """This node as SLURM calls it, otherwise the short host name."""
    return os.environ.get("SLURMD_NODENAME", "") or socket.gethostname().split(".")[0]
