"""What a run writes down: metrics.jsonl (the source of truth), console, TensorBoard, pictures."""
