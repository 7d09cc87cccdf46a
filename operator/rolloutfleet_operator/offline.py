"""``python -m rolloutfleet_operator plan``: where a fleet's engines would go, from files, without a cluster."""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from rolloutfleet_operator.errors import InvalidSpecError
from rolloutfleet_operator.naming import FLEET_KIND
from rolloutfleet_operator.plan.placement.asked import observe_request
from rolloutfleet_operator.plan.placement.observe import observe_nodes, observe_placed
from rolloutfleet_operator.plan.placement.result import Plan, Verdict
from rolloutfleet_operator.plan.placement.solve import plan_placement
from rolloutfleet_operator.plan.placement.tree import DEFAULT_LEVELS, Level
from rolloutfleet_operator.render.placement import render_plan
from rolloutfleet_operator.render.placement_picture import render_picture
from rolloutfleet_operator.render.placement_text import render_text

EXIT_REFUSED: Final = 3
EXIT_NO_ROOM: Final = 4

_HELP: Final = """\
Nodes and pods are Kubernetes objects, as kubectl writes them; pods of the fleets that are planned stay where they are if they can.
The operator itself does not place engines like this yet: it leaves nodes to the scheduler.

examples:
  kubectl get nodes -o yaml > nodes.yaml
  kubectl get pods -A -o yaml > pods.yaml
  rolloutfleet plan -f fleet.yaml --nodes nodes.yaml --pods pods.yaml
  rolloutfleet plan -f fleet.yaml -f other.yaml --nodes nodes.yaml -o svg > racks.svg
  rolloutfleet plan -f fleet.yaml --nodes nodes.yaml --level rack=example.com/rack --level nvlink=nvidia.com/gpu.clique

exit status:
  0  every engine has a place
  2  the command line is wrong
  3  a file or a field is refused: the message names it; also a shape that no node of these could ever hold
  4  engines are left without a place: the message says what is missing and what would make it fit
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="rolloutfleet plan",
        description="Show where the engines of fleets would go, with ranks, a score and a picture.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-f", "--file", action="append", required=True, metavar="FILE", help="a RolloutFleet; repeat for several"
    )
    parser.add_argument("--nodes", required=True, metavar="FILE", help="the cluster's Nodes")
    parser.add_argument("--pods", metavar="FILE", help="the cluster's Pods; without it nothing runs")
    parser.add_argument(
        "--level",
        action="append",
        type=_level,
        metavar="NAME=LABEL",
        help="a kind of domain and the node label that names it, widest first; repeat. Used where a fleet has no placement.levels "
        f"(default: {', '.join(f'{level.name}={level.label}' for level in DEFAULT_LEVELS)})",
    )
    parser.add_argument("-o", "--output", choices=("text", "yaml", "json", "svg"), default="text", help="output format")
    parser.add_argument(
        "--width",
        type=_at_least(20),
        metavar="COLUMNS",
        help="columns of the picture in text (default: the terminal's)",
    )
    parser.add_argument(
        "--first-rank",
        type=_at_least(0),
        default=1,
        metavar="RANK",
        help="the first engine rank: trainers have those before it (default: 1)",
    )
    return parser


def _level(text: str) -> Level:
    name, separator, label = text.partition("=")
    if not (name and separator and label):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=LABEL, such as rack=example.com/rack")
    return Level(name, label)


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return read


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is that of its help."""
    options = build_parser().parse_args(arguments)
    try:
        plan = plan_files(options)
    except (InvalidSpecError, ValueError, OSError) as error:
        words = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        print(f"rolloutfleet plan: {words}", file=sys.stderr)  # noqa: T201 - it is a command
        return EXIT_REFUSED
    sys.stdout.write(_show(plan, options))
    failed = [fleet for fleet in plan.fleets if not fleet.complete]
    for fleet in failed:
        print(f"rolloutfleet plan: fleet {fleet.request.fleet}: {fleet.message}", file=sys.stderr)  # noqa: T201
    if any(fleet.verdict is Verdict.IMPOSSIBLE for fleet in failed):
        return EXIT_REFUSED
    return EXIT_NO_ROOM if failed else 0


def plan_files(options: argparse.Namespace) -> Plan:
    """The plan of what the command line names.

    Raises:
        InvalidSpecError: a field is refused.
        ValueError: a file holds something else than it should.
        OSError: a file cannot be read.
    """
    levels = tuple(options.level) if options.level else DEFAULT_LEVELS
    bodies = [body for path in options.file for body in _objects(path, FLEET_KIND)]
    requests = [observe_request(body, levels) for body in bodies]
    nodes = list(_objects(options.nodes, "Node"))
    pods = list(_objects(options.pods, "Pod")) if options.pods else []
    return plan_placement(observe_nodes(nodes, pods, requests), requests, observe_placed(pods, requests))


def _objects(path: str, kind: str) -> Iterator[Mapping[str, Any]]:
    """The objects of one kind in a file: documents, lists, or both; at least one, but for pods, of which there may be none."""
    kinds = set()
    for body in _bodies(path):
        if not isinstance(body, Mapping):
            raise ValueError(f"{path} holds {body!r:.40}, but a {kind} or a list of them is wanted")  # noqa: TRY004 - of a file
        if body.get("kind", kind) == kind:
            metadata = body.get("metadata")
            if not isinstance(metadata, Mapping) or not isinstance(metadata.get("name"), str):
                raise ValueError(f"{path} holds a {kind} without a metadata.name that is a string")
            yield body
        kinds.add(str(body.get("kind", kind)))
    if kind not in kinds and (kind != "Pod" or kinds):
        raise ValueError(f"{path} holds no {kind}" + (f", but {', '.join(sorted(kinds))}" if kinds else ""))


def _bodies(path: str) -> Iterator[object]:
    try:
        documents = list(yaml.load_all(Path(path).read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    for document in documents:
        if isinstance(document, Mapping) and isinstance(document.get("items"), list):
            yield from document["items"]
        elif document is not None:
            yield document


def _show(plan: Plan, options: argparse.Namespace) -> str:
    if options.output == "svg":
        return render_picture(plan)
    if options.output == "text":
        width = options.width or shutil.get_terminal_size((100, 24)).columns
        return render_text(plan, width, options.first_rank)
    document = render_plan(plan, options.first_rank)
    if options.output == "json":
        return json.dumps(document, indent=2) + "\n"
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
