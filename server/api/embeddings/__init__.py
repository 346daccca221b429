"""Vectors and scores: OpenAI's /v1/embeddings; /v1/rerank and /v1/score as vLLM and others have them."""
