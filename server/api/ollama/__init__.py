"""Ollama's API: from bodies to chat turns or completions, and from these to its lines of JSON."""
