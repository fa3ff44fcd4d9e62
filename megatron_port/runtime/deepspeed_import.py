"""Importing this imports deepspeed, with its accelerator named where there is only one answer.

DeepSpeed looks for a GPU when it is imported, and warns on every rank that it
found none. A CPU build of torch can have none. It also calls names that torch 2.13
has renamed, which warns once a call site on every rank.
"""

from __future__ import annotations

import os
import warnings

import torch

if torch.version.cuda is None and torch.version.hip is None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning)

import deepspeed  # noqa: E402

__all__ = ["deepspeed"]
