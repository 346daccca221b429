"""Slipstream's engine: everything that decides or computes."""
