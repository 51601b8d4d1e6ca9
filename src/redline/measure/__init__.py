"""Measuring: a subject in a separate process, timed in blocks, taking turns with others. Used by `tune` and
`bench`."""
