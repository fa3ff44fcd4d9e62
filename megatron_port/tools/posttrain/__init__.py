"""Training that a script drives: any loss on any layout, and policies that learn from their own samples."""
