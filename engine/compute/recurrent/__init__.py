"""Models that keep a state for each sequence beside, or in place of, K/V."""
