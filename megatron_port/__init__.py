"""Train GPT-like models with tensor, pipeline and data parallelism, from one laptop to thousands of GPUs."""

from __future__ import annotations

__version__ = "0.1.0"
