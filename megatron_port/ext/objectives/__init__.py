"""Losses beside the mean token loss, one file each, with the data that they need."""
