"""A server under mixed load for as long as one likes, and what it must not lose meanwhile: `make soak`."""
