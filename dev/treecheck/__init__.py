"""Rules of the tree that no linter knows, as functions from a checkout to a list of faults."""
