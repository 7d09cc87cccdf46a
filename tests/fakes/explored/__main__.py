"""``python -m fakes.explored``: explore every scenario and keep what was seen.

Ends with status 1 and the way to it when a promise is broken. The numbers go to the file that ``--write`` names.
"""

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path

from fakes.explored.explorer import BrokenPromiseError
from fakes.explored.promises import AT_REST, PROMISES
from fakes.explored.scenarios import DEEP


def main() -> int:
    parser = argparse.ArgumentParser(prog="fakes.explored", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--depth", type=int, default=400, help="most moves from the beginning of a scenario")
    parser.add_argument("--states", type=int, default=10_000_000, help="most states of a scenario")
    parser.add_argument("--seconds", type=float, default=600.0, help="most seconds for a scenario")
    parser.add_argument("--only", default="", help="scenarios whose name contains this; the file keeps the others")
    parser.add_argument("--write", type=Path, help="keep the numbers in this file")
    asked = parser.parse_args()
    runs = []
    for scenario in DEEP:
        if asked.only not in scenario.name:
            continue
        try:
            seen = scenario.explore(depth=asked.depth, states=asked.states, seconds=asked.seconds)
        except BrokenPromiseError as broken:
            print(f"{scenario.name}: {broken}")
            return 1
        run = {
            "scenario": scenario.name,
            "engines": scenario.engines,
            "faults": scenario.faults,
            "states": seen.states,
            "transitions": seen.transitions,
            "depth": seen.depth,
            "rests": seen.rests,
            "longest_way_to_rest": seen.longest_way_to_rest,
            "complete": seen.complete,
            "seconds": round(seen.seconds, 1),
        }
        runs.append(run)
        print(", ".join(f"{name}: {value}" for name, value in run.items()), flush=True)
    if asked.write is not None:
        runs = _among_others(runs, asked.write) if asked.only else runs
        asked.write.write_text(json.dumps(_document(runs, asked), indent=1) + "\n")
    return 0


def _among_others(runs: list[dict[str, object]], file: Path) -> list[dict[str, object]]:
    """The file's scenarios, those that were explored now as they are now."""
    fresh = {run["scenario"]: run for run in runs}
    kept = json.loads(file.read_text())["runs"] if file.exists() else []
    known = {run["scenario"] for run in kept}
    return [fresh.get(run["scenario"], run) for run in kept] + [run for run in runs if run["scenario"] not in known]


def _document(runs: list[dict[str, object]], asked: argparse.Namespace) -> dict[str, object]:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "name": "explore",
        "command": f"make explore DEPTH={asked.depth} SECONDS_EACH={asked.seconds:g}"
        + (f' ONLY="{asked.only}"' if asked.only else ""),
        "commit": found.stdout.strip(),
        "machine": f"{platform.machine()}, one core, CPython {platform.python_version()}",
        "figures": {
            "states": sum(int(str(run["states"])) for run in runs),
            "transitions": sum(int(str(run["transitions"])) for run in runs),
            "scenarios": len(runs),
            "scenarios_complete": sum(bool(run["complete"]) for run in runs),
            "deepest": max((int(str(run["depth"])) for run in runs), default=0),
            "promises_at_every_state": len(PROMISES),
            "promises_at_rest": len(AT_REST) + 3,
            "broken_promises": 0,
            "seconds": round(sum(float(str(run["seconds"])) for run in runs), 1),
        },
        "runs": runs,
    }


if __name__ == "__main__":
    sys.exit(main())
