"""Work on runs, configurations and checkpoints; imported by ``cli`` and one another."""
