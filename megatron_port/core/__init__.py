"""Everything that a training step needs. Imports nothing else of the package; README.md is its reading order."""
