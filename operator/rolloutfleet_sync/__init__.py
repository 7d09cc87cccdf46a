"""The sync job: forms the group of trainer and workers, and publishes one weight version at a time."""
