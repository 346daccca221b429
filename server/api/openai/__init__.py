"""OpenAI's API, with the fields that vLLM added to it."""
