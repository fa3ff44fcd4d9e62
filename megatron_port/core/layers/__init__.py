"""Split linears, attention, experts, dropout; signatures of ops with several providers; the step's context."""
