"""Tool calling on chat completions: how each family of chat templates spells calls, read and forced."""
