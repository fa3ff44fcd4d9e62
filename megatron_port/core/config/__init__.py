"""Configuration without torch: ``schema``, ``loader`` (TOML), ``checks`` (cross-field), ``flops`` (counts)."""
