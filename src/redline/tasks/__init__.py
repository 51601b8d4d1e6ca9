"""Verifiable tasks: questions, prompts, and scores, computed in processes that cannot hang the run."""
