"""Random clusters and fleets, and an exact solver that shares nothing with the planner but the domain tree."""
