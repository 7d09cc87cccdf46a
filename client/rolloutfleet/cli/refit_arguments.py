"""Arguments of ``rolloutfleet refit``."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rolloutfleet.cli.argument_types import namespace

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

REFIT_SECONDS: Final = 3600.0
WAIT_SECONDS: Final = 60.0

_DESCRIPTION: Final = """\
Give every engine of a fleet the weights of a checkpoint, as a trainer would. The checkpoint is a .safetensors file, an index of such files,
or a folder that holds either; on this machine, or at a URI that fsspec reads (s3://, gs://, https:// and others).

exit status:
  0  every engine of the refit serves the version
  1  it failed; engines that are whole serve the version before
  2  wrong arguments
  3  the version is published, but some engines did not follow
  4  the checkpoint cannot be read or does not fit the model; nothing was changed, and trying again will not help
"""

_EXAMPLES: Final = """\
examples:
  rolloutfleet refit quickstart --checkpoint ./step-100 --version 7
  rolloutfleet refit http://127.0.0.1:8080 --checkpoint s3://bucket/run/step-100 --version 8
  rolloutfleet refit quickstart --checkpoint ./step-100 --version 7 --repair
"""


@dataclass(frozen=True, slots=True)
class RefitOptions:
    """What is to be sent where."""

    fleet: str
    """Name of the fleet, or URL of its sync Service."""
    checkpoint: str
    version: int
    repair: bool
    namespace: str | None
    token_file: Path | None
    trainer: str
    advertise: str | None
    take_over: bool
    timeout: float
    wait: float
    termination_log: Path | None


def add_refit(commands: "Commands") -> None:
    """Adds the command to those of ``rolloutfleet``."""
    parser = commands.add_parser(
        "refit",
        help="give every engine the weights of a checkpoint",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("fleet", metavar="FLEET", help="name of the fleet, or URL of its sync Service (http://...)")
    parser.add_argument("--checkpoint", required=True, metavar="PATH|URI", help="where the weights are")
    parser.add_argument(
        "--version", required=True, type=_version, metavar="N", help="weight version; above the fleet's"
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        help="N is the version that the fleet serves already: bring it to the engines that lack it, and touch no other",
    )
    parser.add_argument(
        "-n", "--namespace", type=namespace, help="namespace of the fleet (default: this pod's own, or default)"
    )
    parser.add_argument("--token-file", type=Path, metavar="PATH", help="file with the fleet's token")
    parser.add_argument("--name", default="", help="name shown as the trainer (default: host and process)")
    parser.add_argument("--advertise", metavar="HOST[:PORT]", help="address of this machine at which engines reach it")
    parser.add_argument("--take-over", action="store_true", help="replace a trainer that holds the fleet")
    parser.add_argument("--timeout", type=_seconds, default=REFIT_SECONDS, metavar="SECONDS", help="bounds the refit")
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help="how long to wait for the sync job to answer, and for another trainer to let go of the fleet",
    )
    parser.add_argument(
        "--termination-log", type=Path, metavar="PATH", help="file that takes the reason of a failure too"
    )


def read_refit(given: argparse.Namespace) -> RefitOptions:
    """The options from parsed arguments."""
    return RefitOptions(
        fleet=given.fleet,
        checkpoint=given.checkpoint,
        version=given.version,
        repair=given.repair,
        namespace=given.namespace,
        token_file=given.token_file,
        trainer=given.name,
        advertise=given.advertise,
        take_over=given.take_over,
        timeout=given.timeout,
        wait=given.wait,
        termination_log=given.termination_log,
    )


def _version(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no weight version; it is a whole number from 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give seconds above 0")
    return seconds
