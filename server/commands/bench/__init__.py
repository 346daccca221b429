"""`slipstream bench`: a load generator for any OpenAI-style server. Knows nothing of the engine."""
