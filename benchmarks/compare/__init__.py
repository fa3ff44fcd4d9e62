"""The same GPT through this project and what people would use instead; ``python -m benchmarks.compare --help``."""
