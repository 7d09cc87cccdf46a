"""The sync job's real state machine in a world of immutable parties, whose every next moment can be explored."""
