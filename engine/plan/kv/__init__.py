"""KV accounting: which sequence holds which block. Ids and counts; the tensors live in `engine.compute`."""
