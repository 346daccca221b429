"""From the name of a model to its weights in memory."""
