"""Ranks: who they are, how they meet and agree, the mesh and its groups, parameter records, collectives."""
