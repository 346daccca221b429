"""What decides: requests, scheduling, KV blocks, speculation, metrics. No torch, asyncio or threads."""
