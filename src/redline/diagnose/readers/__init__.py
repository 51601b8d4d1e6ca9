"""From bytes to tables: whatever a trainer wrote becomes rows of named numbers, and those become updates."""
