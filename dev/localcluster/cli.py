"""The command line: `python -m localcluster COMMAND`."""

import argparse
import os
import signal
import textwrap
from collections.abc import Callable, Mapping, Sequence

from localcluster import commands
from localcluster.errors import LauncherError
from localcluster.given_cluster import ALLOW_VARIABLE
from localcluster.images import PROJECT_IMAGES
from localcluster.paths import Paths, find_paths
from localcluster.progress import say

Command = Callable[[argparse.Namespace, Paths, Mapping[str, str]], int]

DESCRIPTION = f"""\
A real Kubernetes on this machine: etcd, API server, controllers, two kubelets with containerd, CoreDNS, and as many
fake KWOK nodes as you like. Everything is built from pinned Go modules; no registry is needed.

Environment:
  KUBECONFIG                 a cluster of your own: it is used, and nothing is built. Refused if it looks like production
  {ALLOW_VARIABLE}  the one context that may look like production
  KUBEBUILDER_ASSETS         a folder with etcd and kube-apiserver (and kubectl) to use instead of building them
  ROLLOUTFLEET_CLUSTER_DIR   state folder (default ~/.local/state/rolloutfleet/cluster): kubeconfig, audit.log, logs/
  XDG_CACHE_HOME             builds are cached in its folder rolloutfleet/ (default ~/.cache)
"""
EXIT = "Exit codes: 0 done, 1 not so (status, leftovers), 2 error."


def _fake_node_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=0, metavar="G", help="nvidia.com/gpu capacity of each fake node")
    parser.add_argument(
        "--prefix", default="fake", help="name of the group: nodes are PREFIX-000, PREFIX-001, … (fake)"
    )
    label = "label of each fake node; in VALUE {i} is its index, {i/8} and {i%%8} the index divided by 8 and the rest"
    parser.add_argument("--label", action="append", default=[], metavar="KEY=VALUE", help=label)
    taint = "taint of each fake node, so that real pods stay away"
    parser.add_argument("--taint", action="append", default=[], metavar="KEY=VALUE:EFFECT", help=taint)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m localcluster", description=DESCRIPTION, epilog=EXIT, formatter_class=form
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, action: Command, text: str, examples: str) -> argparse.ArgumentParser:
        lines = textwrap.indent("\n".join(f"python -m localcluster {line}" for line in examples.splitlines()), "  ")
        added = subparsers.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"examples:\n{lines}",
            formatter_class=form,
        )
        added.set_defaults(action=action)
        return added

    def allow(added: argparse.ArgumentParser) -> None:
        added.add_argument("--allow-context", metavar="NAME", help="use this context although it looks like production")

    added = add(
        "up",
        commands.up,
        "start the cluster, or whatever of it is missing",
        "up\nup --without-kubelets --kwok-nodes 128 --gpus 8",
    )
    added.add_argument(
        "--without-kubelets", action="store_true", help="control plane (and fake nodes) only; needs no root"
    )
    added.add_argument("--kwok-nodes", type=int, default=0, metavar="N", help="also have N fake nodes")
    _fake_node_options(added)
    allow(added)
    added = add(
        "down",
        commands.down,
        "stop the cluster and undo everything that it did to this machine, after a crash too",
        "down\ndown --purge",
    )
    added.add_argument(
        "--purge", action="store_true", help="remove the state folder as well (logs, certificates, imported images)"
    )
    allow(add("status", commands.status, "show components and nodes; exit 1 unless all are healthy", "status"))
    added = add("logs", commands.logs, "show a component's log", "logs kube-apiserver\nlogs kubelet-real-0 -f")
    added.add_argument("component", metavar="COMPONENT", help="a name from `status`")
    added.add_argument("-f", "--follow", action="store_true", help="go on as the log grows")
    added.add_argument("-n", "--lines", type=int, default=100, metavar="N", help="begin N lines before the end (100)")
    text = "make a group of fake nodes consist of exactly N nodes; 0 removes it"
    examples = (
        "kwok-nodes 64 --gpus 8 --label example.com/rack=rack-{i/16}\n"
        "kwok-nodes 16 --prefix gb200 --gpus 4\n"
        "kwok-nodes 0 --prefix gb200"
    )
    added = add("kwok-nodes", commands.kwok_nodes, text, examples)
    added.add_argument("count", type=int, metavar="N")
    _fake_node_options(added)
    text = "build the project's images that changed, import them into the real nodes (needs root), print tags and content keys"
    added = add("images", commands.images, text, "images\nimages --only worker\nimages --refresh")
    added.add_argument("--only", action="append", choices=sorted(PROJECT_IMAGES), help="build this one alone")
    added.add_argument("--refresh", action="store_true", help="make the Debian bases anew, with today's packages")
    add(
        "cpu-env",
        commands.cpu_env,
        "make the CPU build of vLLM that containers find at /opt/vllm; prints its folder",
        "cpu-env",
    )
    add("tools", commands.tools, "print the paths of kubectl and helm as exports", "tools\ntools > tools.env")
    allow(add("env", commands.env, 'print exports that point a shell at the cluster: eval "$(… env)"', "env"))
    allow(add("kubeconfig", commands.kubeconfig, "print the path of the kubeconfig", "kubeconfig"))
    add(
        "audit-log",
        commands.audit_log,
        "print the path of the API server's audit log: one JSON line for each write",
        "audit-log",
    )
    add(
        "leftovers",
        commands.show_leftovers,
        "list whatever of the cluster is on this machine; exit 1 if anything is",
        "leftovers",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs one command; its exit code. Errors that the user can act on are shown without a traceback."""
    # A closed terminal or a `kill` unwinds like Ctrl-C does, so that locks and temporary folders are left in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parsed = build_parser().parse_args(arguments)
    environment = dict(os.environ)
    try:
        action: Command = parsed.action
        return action(parsed, find_paths(environment), environment)
    except LauncherError as error:
        say(f"error: {error}")
        return 2
    except BrokenPipeError:
        # The reader went away (`| head`): nothing is left to tell it, not even when the interpreter flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        say("interrupted; run the command again to go on, or `down` to take everything away")
        return 130
