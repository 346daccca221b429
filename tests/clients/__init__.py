"""Well-known clients, unmodified and in an environment of their own, against running servers."""
