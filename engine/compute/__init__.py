"""Everything that touches weights: finding and loading a model, its paged attention and its forward pass.

Owns torch and transformers; must not import asyncio, executors, the scheduler or a request.
"""
