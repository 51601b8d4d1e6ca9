"""The Plan: facts + recipe -> how a run is executed, every value with its reason. Pure arithmetic, no torch."""
