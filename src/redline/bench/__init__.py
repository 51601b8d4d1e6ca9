"""Benchmarks: Redline's real loop beside the alternatives on the same work, in one run. Written to
`benchmarks/` by the program itself."""
