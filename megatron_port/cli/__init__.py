"""The command line: ``main`` and one module a command, imported only when that command is asked for."""
