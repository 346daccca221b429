"""KV accounting: which sequence holds which block. Ids and counts only; the tensors live in `engine.compute`."""
