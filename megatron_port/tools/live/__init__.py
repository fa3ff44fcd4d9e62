"""The live page of a run: a server on the loopback interface that follows the run's files. No torch."""
