"""What decides. No torch, asyncio or threads; what is not frozen is for the event-loop thread only."""
