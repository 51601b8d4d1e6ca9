"""The catalogue of optimisations. Runs without torch."""
