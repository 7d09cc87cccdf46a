"""Arguments of ``rolloutfleet release`` and ``rolloutfleet revive``."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rolloutfleet.cli.argument_types import namespace

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_RELEASE: Final = """\
End what spec.refit.onFailure: Hold began: whole engines, which refuse requests since a refit failed, serve the committed version
again. It asks the fleet's sync job, as a trainer does. A refit that completes ends it too.

exit status:
  0  the engines are told to serve
  1  it failed, or nothing is held
  2  wrong arguments
"""
_RELEASE_EXAMPLES: Final = """\
examples:
  rolloutfleet release quickstart
  rolloutfleet release quickstart -n rl
  rolloutfleet release http://127.0.0.1:8080 --token-file ./token    # behind kubectl port-forward service/quickstart-sync 8080
"""
_REVIVE: Final = """\
Give retired engines another chance: ones that failed more often than spec.recovery.restartBudget allows, whose pods are not made any
more. Their failures are forgotten. It writes the annotation rolloutfleet.io/revive of the fleet, which the operator obeys.

exit status:
  0  the operator is asked
  1  it failed, or an engine is not retired
  2  wrong arguments
"""
_REVIVE_EXAMPLES: Final = """\
examples:
  rolloutfleet revive quickstart 1        engine 1
  rolloutfleet revive quickstart 1 3 -n rl
  rolloutfleet revive quickstart --all    every retired engine; nodes that are avoided are used again, too
"""


@dataclass(frozen=True, slots=True)
class ReleaseOptions:
    """Whose engines are to serve again."""

    fleet: str
    """Name of the fleet, or URL of its sync Service."""
    namespace: str | None
    token_file: Path | None


@dataclass(frozen=True, slots=True)
class ReviveOptions:
    """Which engines get another chance."""

    fleet: str
    engines: tuple[int, ...]
    """Empty for all that are retired."""
    namespace: str | None
    kubeconfig: str | None
    context: str | None


def add_release(commands: "Commands") -> None:
    """Adds ``release`` to the commands of ``rolloutfleet``."""
    parser = commands.add_parser(
        "release",
        help="let engines serve that are held since a refit failed",
        description=_RELEASE,
        epilog=_RELEASE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("fleet", metavar="FLEET", help="name of the fleet, or URL of its sync Service (http://...)")
    parser.add_argument(
        "-n", "--namespace", type=namespace, help="namespace of the fleet (default: this pod's own, or default)"
    )
    parser.add_argument("--token-file", type=Path, metavar="PATH", help="file with the fleet's token")


def add_revive(commands: "Commands") -> argparse.ArgumentParser:
    """Adds ``revive`` to the commands of ``rolloutfleet``."""
    parser = commands.add_parser(
        "revive",
        help="give retired engines another chance",
        description=_REVIVE,
        epilog=_REVIVE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("fleet", metavar="FLEET", help="name of the fleet")
    parser.add_argument("engines", nargs="*", type=_engine, metavar="ENGINE", help="number of an engine, from 0")
    parser.add_argument("--all", action="store_true", help="all engines that are retired")
    parser.add_argument(
        "-n", "--namespace", type=namespace, help="namespace (default: that of the kubeconfig's context)"
    )
    parser.add_argument("--kubeconfig", help="path of a kubeconfig file (default: KUBECONFIG or ~/.kube/config)")
    parser.add_argument("--context", help="context of the kubeconfig (default: the current one)")
    return parser


def read_release(given: argparse.Namespace) -> ReleaseOptions:
    """The options from parsed arguments."""
    return ReleaseOptions(fleet=given.fleet, namespace=given.namespace, token_file=given.token_file)


def read_revive(given: argparse.Namespace, parser: argparse.ArgumentParser) -> ReviveOptions:
    """The options from parsed arguments; ends the process unless engines are named, or all of them are meant."""
    if bool(given.engines) == given.all:
        parser.error("name the engines by their numbers, or give --all, one of the two")
    return ReviveOptions(
        fleet=given.fleet,
        engines=tuple(sorted(set(given.engines))),
        namespace=given.namespace,
        kubeconfig=given.kubeconfig,
        context=given.context,
    )


def _engine(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no engine; it is a whole number from 0, as `rolloutfleet status` shows it"
        )
    return int(text)
