"""Structured output: from the form a request asks for to a mask of tokens for each position of its reply."""
