"""One level-triggered pass per fleet: load, observe, plan, render, apply, summarize, one status write, then events."""
