"""A training run put together: session, what it resumes from, hooks, saving. May import the core and ext."""
