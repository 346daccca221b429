"""Steps that the host only starts: recorded passes, tokens that stay on the device, results read late."""
