"""Generation: requests in, completions out."""
