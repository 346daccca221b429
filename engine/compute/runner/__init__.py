"""The forward pass of one step, and what measures and checks it."""
