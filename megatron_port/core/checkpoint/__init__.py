"""Saving and loading training state: format, commit protocol, verification, resharding, retention."""
