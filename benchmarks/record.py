"""The JSON file of one benchmark: written anew after each part, so that a run that is cut short keeps what it has measured."""

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("docs/benchmarks")
TINY = os.environ.get("TINY", "") not in {"", "0"}
"""Whether this is a dry run on CPUs, with toy shapes."""
_BEGAN = time.monotonic()


def say(*words: object) -> None:
    """One line of progress, with the seconds since the program began."""
    print(f"[{time.monotonic() - _BEGAN:6.1f} s]", *words, flush=True)


def median(values: Sequence[float]) -> float:
    """The median, or ValueError for no values: a figure must not be made of nothing."""
    if not values:
        raise ValueError("no values were measured, so there is no median")
    return statistics.median(values)


def commit() -> str:
    """The commit that is measured: BENCHMARK_COMMIT where the checkout came without git, else HEAD, marked when files differ that are no
    results."""
    if given := os.environ.get("BENCHMARK_COMMIT"):
        return given
    try:
        head, changed = (
            subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", ".", ":!docs/benchmarks"])
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+changes" if changed else head


def command() -> str:
    """How this program was started, from the checkout's root."""
    path = Path(sys.argv[0]).resolve()
    program = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    module = ".".join(program.with_suffix("").parts).removesuffix(".__main__")
    named = ["-m", module] if program.parts[0] == "benchmarks" else [str(program)]
    return shlex.join([*(["TINY=1"] if TINY else []), "python3", *named, *sys.argv[1:]])


def machine() -> str:
    """The accelerators of this machine with the versions below them, or its processor."""
    processor = f"{os.cpu_count()} x {platform.machine()} CPU"
    if find_spec("torch") is None:
        return processor
    import torch

    if not torch.cuda.is_available():
        return f"{processor}, torch {torch.__version__}"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {nccl}"


@dataclass
class Record:
    """A benchmark's runs and figures; :meth:`write` after each part."""

    name: str
    path: Path
    runs: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Parts that ended early, with their error."""
    commands: list[str] = field(default_factory=list)
    """Of the runs that this one goes on from."""

    def resume(self) -> None:
        """Go on from what the file holds already; ValueError when that was measured on another commit or machine."""
        if not self.path.exists():
            return
        content = json.loads(self.path.read_text())
        for key, here in (("commit", commit()), ("machine", machine())):
            if content[key] != here:
                raise ValueError(f"{self.path} was measured on {key} {content[key]}, this is {here}: begin a new file")
        self.runs, self.figures, self.failures = content["runs"], content["figures"], content.get("failures", {})
        self.commands = content["commands"]

    def add(self, **run: Any) -> None:
        """Keep one raw run."""
        self.runs.append(run)

    def figure(self, name: str, value: float, **also: Any) -> None:
        """Set a figure, say it, and write the file."""
        self.figures[name] = value
        say(f"{self.name}: {name} = {value:.6g}", *(f"{key}={what}" for key, what in also.items()))
        self.write()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run one part; a failure is kept and said, and the parts after it still run: device time is too dear to lose them."""
        began = time.monotonic()
        self.failures.pop(name, None)
        say(f"{self.name}: {name} begins")
        try:
            yield
        except Exception as error:  # noqa: BLE001 - kept in the file, and the program exits with 1
            self.failures[name] = f"{type(error).__name__}: {error}"
            say(f"{self.name}: {name} FAILED: {self.failures[name][:2000]}")
        say(f"{self.name}: {name} took {time.monotonic() - began:.1f} s")
        self.write()

    def write(self) -> None:
        """The whole file, by replacement."""
        content = {
            "name": self.name,
            "commands": [*self.commands, command()],
            "commit": commit(),
            "machine": machine(),
            "figures": self.figures,
            **({"failures": self.failures} if self.failures else {}),
            "runs": self.runs,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".part")
        fresh.write_text(json.dumps(content, indent=1) + "\n")
        fresh.replace(self.path)

    @property
    def exit_code(self) -> int:
        return 1 if self.failures else 0
