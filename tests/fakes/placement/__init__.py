"""What the planner is given in tests: objects as kubectl writes them, and situations of every kind."""
