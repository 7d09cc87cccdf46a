"""Runs a program that prints lines of JSON, and keeps them in the form of a benchmark's results.

``python3 -m benchmarks.keep_lines NAME PROGRAM [ARGUMENT...]`` shows what the program prints, and writes ``NAME.json`` as it goes: each
line of JSON is a run, each number in it a figure, named by where it stands. It exits as the program does.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.record import Record
from benchmarks.starting import results_folder


def numbers(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number in an object and in the objects below it, by the names that lead to it."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}_")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value


def main() -> int:
    name, *program = sys.argv[1:]
    record = Record(name, results_folder() / f"{name}.json")
    process = subprocess.Popen([sys.executable, *program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith("{"):
            run = json.loads(line)
            record.add(**run)
            record.figures |= dict(numbers(run))
            record.write()
    if code := process.wait():
        record.failures[name] = f"it ended with exit code {code}"
    record.write()
    return code


if __name__ == "__main__":
    sys.exit(main())
