"""Importing this imports deepspeed, with its accelerator named where there is only one answer.

DeepSpeed looks for a GPU when it is imported, and warns on every rank that it
found none. A CPU build of torch can have none.
"""

from __future__ import annotations

import os

import torch

if torch.version.cuda is None and torch.version.hip is None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed

__all__ = ["deepspeed"]
