"""Embeddings and scores beside the generator: their queue, their turns on the target thread, their limits."""
