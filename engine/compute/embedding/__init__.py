"""Models that turn a text into a vector, or a pair into a score, as sentence-transformers lays them out."""
