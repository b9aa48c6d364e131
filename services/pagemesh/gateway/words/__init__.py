"""Text and tokens: templates, tokenizer, stop strings."""
