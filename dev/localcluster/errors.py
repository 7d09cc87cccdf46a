"""The one error that the launcher shows to its user."""


class LauncherError(Exception):
    """A problem that the user can act on: the text names what failed, the rule, and what to do next."""
