"""Protocol of an engine, and the native engine: a step as a list of parts."""
