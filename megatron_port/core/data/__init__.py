"""Token files, samples in an order that no layout changes, the loader, micro-batches, the objective."""
