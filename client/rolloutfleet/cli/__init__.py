"""The ``rolloutfleet`` command, installed as ``kubectl-rolloutfleet`` too."""

import sys
from collections.abc import Sequence

from rolloutfleet.cli.arguments import parse
from rolloutfleet.cli.failure import Failure
from rolloutfleet.cli.refit_arguments import RefitOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 0, 1 when it failed with a message on stderr, 2 for wrong arguments; ``refit`` has some more."""
    options = parse(sys.argv[1:] if argv is None else argv)
    if isinstance(options, RefitOptions):
        from rolloutfleet.cli.refitting import refit_from_checkpoint

        return refit_from_checkpoint(options)
    try:
        try:
            from rolloutfleet.cli.history import show_history
            from rolloutfleet.cli.status import show_status
        except ModuleNotFoundError as error:
            raise Failure(
                f"this command needs the package {error.name!r}; install it with: pip install 'rolloutfleet[cli]'"
            ) from error
        if options.command == "refit-history":
            show_history(options)
        else:
            show_status(options)
    except Failure as failure:
        print(f"rolloutfleet: {failure}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 0 if options.watch else 1
    return 0
