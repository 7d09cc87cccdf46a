"""What the tests against a real API server stand on: a client that waits by watching, simulated nodes, the operator's process."""
