"""Numbers on the ghost machine for programs that nobody forks: torch calls ``load`` at the end of its own import.

This folder in PYTHONPATH is a distribution with an entry point of torch's group ``torch.backends``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def load() -> None:
    """Compute torch's operators (answers.py), and have the package load the kernels of ``GHOST_KERNELS``."""
    if os.environ.get("GHOST_COMPUTE") != "1":
        return
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    import torch
    from answers import Answers, use_kernels

    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN cannot be loaded here
    Answers().__enter__()
    if library := os.environ.get("GHOST_KERNELS"):
        use_kernels(Path(library))
