"""The other side of the wire: what `bench` and `chat` need to talk to any OpenAI-style server.

Standard library and httptools only; knows nothing of the engine.
"""
