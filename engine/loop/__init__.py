"""The event loop of the engine, its executors and its streams."""
