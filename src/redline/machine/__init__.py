"""What this machine is (facts, without torch) and what it can do (measured ceilings, with torch)."""
