"""GGUF files: one file with a model's configuration, tokenizer and weights. Loads no torch."""
