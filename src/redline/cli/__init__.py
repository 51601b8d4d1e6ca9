"""The command line: one sub-command a verb; each imports its room when it is called, and holds no logic."""
