"""The bundled demo model: a seeded text generator, a tokenizer, a trainer and an evaluation."""
