"""The plugin: ``plugins = ["signum"]`` in a run file, with this folder on PYTHONPATH.

It names the rule without importing it, so that ``megatron-port config check`` does not import torch. The planner
imports it, to ask what it keeps of each parameter.
"""

from megatron_port.core.registry import OPTIMIZERS

OPTIMIZERS.add("signum", "signum_rule:SIGNUM")
