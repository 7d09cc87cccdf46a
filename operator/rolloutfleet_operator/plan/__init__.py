"""Pure decisions: what is observed in, what should be done out. No clock, no I/O, no randomness; ``now`` is passed in."""
