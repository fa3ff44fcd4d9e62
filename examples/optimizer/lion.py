"""The plugin: ``plugins = ["lion"]`` in a run file, with this folder on PYTHONPATH.

It names the rule without importing it, so that ``megatron-port plan`` and ``config check`` do not import torch.
"""

from megatron_port.registry import OPTIMIZERS

OPTIMIZERS.add("lion", "lion_rule:LION")
