"""Speculation under a virtual clock: the real loop, a made-up target and drafter, and the formulas."""
