"""OpenAI's files and batches: jobs of many requests, answered in rows that nobody else uses."""
