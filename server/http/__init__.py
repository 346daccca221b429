"""Sockets, limits, middleware, and JSON as it comes and goes."""
