"""The ``rolloutfleet`` command, installed as ``kubectl-rolloutfleet`` too."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from rolloutfleet.cli.arguments import Options, parse
from rolloutfleet.cli.failure import Failure
from rolloutfleet.cli.installed import BROUGHT_BY, load_command
from rolloutfleet.cli.mending_arguments import ReleaseOptions, ReviveOptions
from rolloutfleet.cli.refit_arguments import RefitOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 0, 1 when it failed with a message on stderr, 2 for wrong arguments; two commands have more."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in BROUGHT_BY:
        try:
            return load_command(given[0])(given[1:])
        except Failure as failure:
            print(f"rolloutfleet: {failure}", file=sys.stderr)
            return 1
    options = parse(given)
    if isinstance(options, RefitOptions):
        from rolloutfleet.cli.refitting import refit_from_checkpoint

        return refit_from_checkpoint(options)
    try:
        _run(options)
    except Failure as failure:
        print(f"rolloutfleet: {failure}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 0 if isinstance(options, Options) and options.watch else 1
    return 0


def _run(options: Options | ReleaseOptions | ReviveOptions) -> None:
    if isinstance(options, ReleaseOptions):
        from rolloutfleet.cli.releasing import release_engines

        release_engines(options)
        return
    try:
        from rolloutfleet.cli.cluster import Cluster
        from rolloutfleet.cli.history import show_history
        from rolloutfleet.cli.reviving import revive_engines
        from rolloutfleet.cli.status import show_status
    except ModuleNotFoundError as error:
        raise Failure(
            f"this command needs the package {error.name!r}; install it with: pip install 'rolloutfleet[cli]'"
        ) from error
    if isinstance(options, ReviveOptions):
        revive_engines(options, Cluster(options), datetime.now(UTC))
    elif options.command == "refit-history":
        show_history(options)
    else:
        show_status(options)
