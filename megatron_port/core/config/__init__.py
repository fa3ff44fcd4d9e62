"""Configuration without torch: ``schema``, ``loader`` (TOML), ``checks``, each feature's section and conflicts."""
