"""OpenAI's Responses API: from bodies to chat turns, from these to responses and events, and the store."""
