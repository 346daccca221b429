"""Speculation: what is drafted for which request, how much of it is verified, and what came of it."""
