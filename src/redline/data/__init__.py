"""Corpus -> tokenizer -> memory-mapped token shards (or a stream) -> batches in a fixed, resumable order."""
