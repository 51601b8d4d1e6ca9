"""The Record: the run folder and the lines that a running program appends to it. No torch."""
