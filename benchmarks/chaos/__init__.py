"""Faults put into real parties while they refit, and a judge that sees them from outside."""
