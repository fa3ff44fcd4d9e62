"""Importing this imports deepspeed before ranks are forked, where that does no harm.

DeepSpeed asks CUDA for its devices while it is imported. A process that is forked afterwards cannot use CUDA ("Cannot
re-initialize CUDA in forked subprocess"). With a build of torch for GPUs each rank therefore imports it itself.

Raises EnvironmentFault where it is not installed.
"""

from __future__ import annotations

import torch

from megatron_port.ext.deepspeed.deepspeed_installed import require_deepspeed

require_deepspeed()
if torch.version.cuda is None and torch.version.hip is None:
    import megatron_port.ext.deepspeed.deepspeed_import  # noqa: F401
