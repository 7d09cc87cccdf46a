"""What ends the command with a message instead of a stack."""


class Failure(Exception):  # noqa: N818 - it is shown to people, not handled
    """A sentence for the person at the terminal: what failed and what to do next."""
