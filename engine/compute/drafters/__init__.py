"""Draft sources behind one Protocol: model-free ones, a small model, heads on the target."""
