"""The planner of placement: how fast it is, how near to the optimum, and how many engines it places beside other rules."""
