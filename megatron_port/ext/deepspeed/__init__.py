"""DeepSpeed as the engine, an optional dependency."""
