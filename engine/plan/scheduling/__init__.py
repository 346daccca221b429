"""Scheduling: what runs in the next step. No torch, asyncio or threads."""
