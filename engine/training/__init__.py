"""Fits drafters to their target."""
