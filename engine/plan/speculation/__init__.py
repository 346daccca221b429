"""Speculation: who drafts, what is on the tape, how much is verified, and what came of it."""
