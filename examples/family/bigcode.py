"""The plugin: ``plugins = ["bigcode"]`` in a run file or ``--plugin bigcode``, with this folder on PYTHONPATH.

It names the family without importing it; the name is the ``model_type`` of its config.json.
"""

from megatron_port.core.registry import FAMILIES

FAMILIES.add("gpt_bigcode", "bigcode_family:FAMILY")
