"""`slipstream doctor`: what `serve` would use with the same flags, why, and what would stop it."""
