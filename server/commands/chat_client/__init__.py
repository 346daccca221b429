"""`slipstream chat`: a conversation on a terminal, or one answer in a pipe, with any OpenAI-style server."""
