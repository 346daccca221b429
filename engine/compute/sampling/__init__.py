"""From logits to tokens: adjustments, filters, stateless noise, the draw and its log-probabilities."""
