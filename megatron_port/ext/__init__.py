"""Features. Each package imports the core and itself; they are found by name through ``core.registry``."""
