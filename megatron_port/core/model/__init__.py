"""Specs of the model (parameters, cost, operations; without torch) and the modules built from them."""
