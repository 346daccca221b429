"""From the tokens of a reply to its parts: reasoning, content and tool calls, as they come."""
