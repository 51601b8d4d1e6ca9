"""Measuring: a subject in a process of its own, timed in blocks, taking turns with others. `tune` and `bench`
use it."""
