"""A discrete-event simulator around the real batcher and KV manager: hours of serving in seconds."""
