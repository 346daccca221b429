"""Every causal class of transformers, tiny and random, served and compared with its own forward pass."""
