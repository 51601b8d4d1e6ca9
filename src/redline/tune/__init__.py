"""Trials in child processes, what they measured compared honestly, and the search for the fastest plan."""
