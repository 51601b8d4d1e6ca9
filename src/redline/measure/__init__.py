"""Measuring: a subject in a separate process, timed in blocks, taking turns with others. `tune` and `bench`
use it."""
