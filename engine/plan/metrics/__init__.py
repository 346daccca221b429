"""What the engine counts and times, as plain records."""
