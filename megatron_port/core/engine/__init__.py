"""The protocol of an engine, and the native one: a step as a list of parts."""
