"""What a rank keeps and where: recompute by site, swapped activations, offloaded state."""
