"""Attention behind one seam: `variants` says what a variant is, and each of the other files holds one way to compute it."""
