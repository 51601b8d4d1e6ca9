"""The transformer, and weights in and out of Hugging Face folders and GGUF files."""
