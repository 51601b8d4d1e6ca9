"""The catalogue of optimisations: what each claims, when it applies, what it switches, and what it does to
numbers. Runs without torch."""
