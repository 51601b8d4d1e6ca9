"""Verifiable tasks: questions, how they are prompted, and how a completion is scored, in processes that
cannot hang the run."""
