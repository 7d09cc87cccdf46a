"""Several trainer processes as one: rank 0 talks to the fleet and tells the others what to do."""

from rolloutfleet.team.forming import form_team
from rolloutfleet.team.links import Follower, Leader, Team

__all__ = ["Follower", "Leader", "Team", "form_team"]
