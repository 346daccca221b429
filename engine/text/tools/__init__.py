"""How models call tools in text: one module a family of formats, found by the chat template."""
