"""Job scripts of a run on a cluster, and what a job does when it ends. Needs no torch: it runs on login nodes."""
