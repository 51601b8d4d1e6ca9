"""Generation from a model that is in memory."""
