"""The command line: one sub-command per verb. Each imports its room only when called, and holds no logic."""
