"""Arguments of the ``rolloutfleet`` command."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import rolloutfleet
from rolloutfleet.cli.argument_types import namespace
from rolloutfleet.cli.installed import BROUGHT_BY
from rolloutfleet.cli.mending_arguments import (
    ReleaseOptions,
    ReviveOptions,
    add_release,
    add_revive,
    read_release,
    read_revive,
)
from rolloutfleet.cli.refit_arguments import RefitOptions, add_refit, read_refit

_EXAMPLES: Final = """\
examples:
  rolloutfleet status                     every fleet of the current namespace
  rolloutfleet status -A                  every fleet of the cluster
  rolloutfleet status quickstart          one fleet: conditions, engines, weights, last refit
  rolloutfleet status quickstart --watch  the same, redrawn every two seconds
  rolloutfleet status quickstart -o json  the objects themselves, for jq
  rolloutfleet status --url http://127.0.0.1:8080   what the sync job says, without Kubernetes
  rolloutfleet refit-history quickstart   its refits: seconds by phase, slowest rank, who was lost and where
  rolloutfleet refit-history quickstart --plot refits.svg
  rolloutfleet release quickstart         let engines serve that are held since a refit failed
  rolloutfleet revive quickstart 1        another chance for a retired engine
  rolloutfleet plan -f fleet.yaml --nodes nodes.yaml   where engines would go
  kubectl rolloutfleet status -n rl       the same command, called by kubectl
"""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for."""

    fleet: str | None
    namespace: str | None
    all_namespaces: bool
    output: str
    watch: bool
    kubeconfig: str | None
    context: str | None
    command: str = "status"
    url: str | None = None
    token_file: Path | None = None
    plot: Path | None = None


def parse(argv: Sequence[str]) -> Options | RefitOptions | ReleaseOptions | ReviveOptions:
    """Options from the command line; ends the process for ``--help``, ``--version`` and wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="rolloutfleet",
        description="Look at fleets of vLLM engines whose weights are refitted as one, refit them from checkpoints, and mend them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rolloutfleet {rolloutfleet.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    status = commands.add_parser(
        "status",
        help="show fleets, their engines and their last refit",
        description="Show fleets, their engines and their last refit, as the cluster's API has them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    status.add_argument("fleet", nargs="?", metavar="FLEET", help="name of one fleet; all fleets when left out")
    where = status.add_mutually_exclusive_group()
    where.add_argument(
        "-n", "--namespace", type=namespace, help="namespace (default: that of the kubeconfig's context)"
    )
    where.add_argument("-A", "--all-namespaces", action="store_true", help="fleets of every namespace")
    status.add_argument("-o", "--output", choices=("table", "json", "yaml"), default="table", help="output format")
    status.add_argument("-w", "--watch", action="store_true", help="redraw every two seconds until interrupted")
    status.add_argument("--kubeconfig", help="path of a kubeconfig file (default: KUBECONFIG or ~/.kube/config)")
    status.add_argument("--context", help="context of the kubeconfig (default: the current one)")
    _add_url(status)
    history = _add_history(commands)
    add_refit(commands)
    for name, distribution in BROUGHT_BY.items():
        commands.add_parser(name, add_help=False, help=f"show where engines would go (with {distribution} installed)")
    add_release(commands)
    revive = add_revive(commands)
    given = parser.parse_args(argv)
    if given.command == "refit":
        return read_refit(given)
    if given.command == "release":
        return read_release(given)
    if given.command == "revive":
        return read_revive(given, revive)
    if given.command == "refit-history":
        return _read_history(given, history)
    if given.url and (given.all_namespaces or given.output != "table"):
        status.error(
            "--url shows one fleet as a table; for its JSON use: curl -H 'Authorization: Bearer TOKEN' URL/rolloutfleet/v1/fleet"
        )
    if given.fleet and given.all_namespaces:
        status.error(f"-A shows every fleet; name the namespace of {given.fleet} with -n")
    if given.watch and given.output != "table":
        status.error("--watch redraws a table; for json and yaml use kubectl get rolloutfleets -w")
    return Options(
        fleet=given.fleet,
        namespace=given.namespace,
        all_namespaces=given.all_namespaces,
        output=given.output,
        watch=given.watch,
        kubeconfig=given.kubeconfig,
        context=given.context,
        url=given.url,
        token_file=given.token_file,
    )


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="ask the fleet's sync job at this address instead of Kubernetes")
    parser.add_argument(
        "--token-file", type=Path, help="file that holds the fleet's token, for --url (default: as connect() finds it)"
    )


def _add_history(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "refit-history",
        help="show the refits that a fleet remembers",
        description="Show the refits that a fleet remembers: seconds by phase, the slowest rank, who was missing or lost, and why.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="FLEET", help="name of the fleet")
    parser.add_argument("--fleet", help="the same")
    parser.add_argument(
        "-n", "--namespace", type=namespace, help="namespace (default: that of the kubeconfig's context)"
    )
    _add_url(parser)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="output format")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw a bar of phases for each refit, too")
    parser.add_argument("--kubeconfig", help="path of a kubeconfig file (default: KUBECONFIG or ~/.kube/config)")
    parser.add_argument("--context", help="context of the kubeconfig (default: the current one)")
    return parser


def _read_history(given: argparse.Namespace, parser: argparse.ArgumentParser) -> Options:
    fleet = given.name or given.fleet
    if bool(fleet) == bool(given.url):
        parser.error("name the fleet, or give the --url of its sync job, one of the two")
    return Options(
        fleet=fleet,
        namespace=given.namespace,
        all_namespaces=False,
        output=given.output,
        watch=False,
        kubeconfig=given.kubeconfig,
        context=given.context,
        command="refit-history",
        url=given.url,
        token_file=given.token_file,
        plot=given.plot,
    )
