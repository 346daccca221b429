"""KV accounting: which block belongs to whom. Ids and counts only; the tensors live in `engine.compute`."""
