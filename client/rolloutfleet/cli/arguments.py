"""Arguments of the ``rolloutfleet`` command."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import rolloutfleet

_EXAMPLES: Final = """\
examples:
  rolloutfleet status                     every fleet of the current namespace
  rolloutfleet status -A                  every fleet of the cluster
  rolloutfleet status quickstart          one fleet: conditions, engines, weights, last refit
  rolloutfleet status quickstart --watch  the same, redrawn every two seconds
  rolloutfleet status quickstart -o json  the objects themselves, for jq
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


def parse(argv: Sequence[str]) -> Options:
    """Options from the command line; ends the process for ``--help``, ``--version`` and wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="rolloutfleet",
        description="Look at fleets of vLLM engines whose weights are refitted as one.",
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
    where.add_argument("-n", "--namespace", help="namespace (default: that of the kubeconfig's context)")
    where.add_argument("-A", "--all-namespaces", action="store_true", help="fleets of every namespace")
    status.add_argument("-o", "--output", choices=("table", "json", "yaml"), default="table", help="output format")
    status.add_argument("-w", "--watch", action="store_true", help="redraw every two seconds until interrupted")
    status.add_argument("--kubeconfig", help="path of a kubeconfig file (default: KUBECONFIG or ~/.kube/config)")
    status.add_argument("--context", help="context of the kubeconfig (default: the current one)")
    given = parser.parse_args(argv)
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
    )
