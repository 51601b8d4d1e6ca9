"""Benchmarks: Redline against its alternatives on the same work, in one run. The program writes the results itself,
to `benchmarks/`."""
