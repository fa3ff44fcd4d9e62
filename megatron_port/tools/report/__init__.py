"""A run's report: its metrics as pictures and tables on one page."""
