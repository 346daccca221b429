"""Anthropic's Messages API: from bodies to chat turns, and from these to messages and events."""
