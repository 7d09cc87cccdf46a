"""Run the whole product on this machine, or take it away again.

examples:
  python -m demo up      cluster, images, chart, fleet, two refits, a table; exit code 0 only if every engine gave transformers' tokens
  python -m demo down    the fleet, the release and the cluster
"""

import argparse
import sys

from rich.console import Console

from demo.stage import Stage, StageError
from demo.table import print_table
from localcluster.errors import LauncherError


def main() -> int:
    """Exit code 0 when all outputs were equal, 1 when some were not, 2 when a step failed."""
    parser = argparse.ArgumentParser(
        "python -m demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("up", "down"))
    parser.add_argument("--refits", type=int, default=2, help="how often the trainer refits (2)")
    arguments = parser.parse_args()
    stage = Stage.here()
    try:
        if arguments.action == "down":
            stage.take_down()
            return 0
        stage.set_up()
        lines, equal = stage.train(arguments.refits)
    except (StageError, LauncherError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    print_table(lines, Console(width=220))
    if not equal:
        print("demo: some engine's output differs from transformers'", file=sys.stderr)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
