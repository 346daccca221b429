"""Follows the README word for word on a fresh clone: `make test-readme`."""
