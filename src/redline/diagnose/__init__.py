"""Records or a foreign trainer's log -> findings: cause, evidence, fix, predicted gain. No torch."""
