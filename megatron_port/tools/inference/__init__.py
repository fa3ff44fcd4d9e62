"""Generation, scoring, perplexity, the ``lm_eval`` adapter."""
