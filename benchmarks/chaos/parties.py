"""A party of a run: processes in a process namespace of their own, started anew by a supervisor that plays the kubelet.

As in a container, everything below the main process dies with it, by the kernel's hand. The kubelet's back-off between restarts and its
long probe periods are left out, so that a run takes seconds.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.chaos.network import Plug
from benchmarks.record import ROOT

RESTART_SECONDS = 0.2
PROBE_SECONDS = 1.0
PROBE_FAILURES = 3
_CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--")
_STANDIN = ROOT / "benchmarks/chaos/standin"
_PATHS = ("client", "operator", "worker_image", ".")


class Party:
    """One container: a command, its network, its log, and what becomes of it when it ends."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        plug: Plug,
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        standin: bool = False,
        probe: str = "",
        talks: bool = False,
    ) -> None:
        """``probe`` is the URL whose failure has the container restarted; with ``talks`` stdin and stdout are pipes to the supervisor."""
        self.name = name
        self.plug = plug
        self.log = folder / f"{name}.log"
        self.probe = probe
        self.restarts = 0
        self._command = list(command)
        self._talks = talks
        paths = [*([str(_STANDIN)] if standin else []), *(str(ROOT / part) for part in _PATHS)]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("ROLLOUTFLEET_")}
        self._environment = {
            **inherited,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            **(environment or {}),
        }
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it, or start it anew."""
        pipe = subprocess.PIPE if self._talks else subprocess.DEVNULL
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*self.plug.command_prefix(), *_CONTAINER, *self._command],
                env=self._environment,
                cwd=ROOT,
                stdin=pipe,
                stdout=pipe if self._talks else log,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def main_pid(self) -> int:
        """The container's main process; ProcessLookupError when it is not there."""
        if self.process is None:
            raise ProcessLookupError(f"{self.name} was never started")
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        found = children.read_text().split() if children.exists() else []
        if not found:
            raise ProcessLookupError(f"{self.name} does not run")
        return int(found[0])

    def pids(self) -> dict[int, str]:
        """Every process below the supervisor's end of the container, with its title."""
        if self.process is None:
            return {}
        known: dict[int, tuple[int, str]] = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                line = (path / "stat").read_text()
                title = line[line.find("(") + 1 : line.rfind(")")]
                known[int(path.name)] = (int(line.rpartition(")")[2].split()[1]), title)
        below: dict[int, str] = {}
        frontier = {self.process.pid}
        while frontier:
            frontier = {pid for pid, (parent, _) in known.items() if parent in frontier}
            below |= {pid: known[pid][1] for pid in frontier}
        return below

    def titled(self, word: str) -> int:
        """The process whose title holds the word; ProcessLookupError when there is none."""
        for pid, title in sorted(self.pids().items()):
            if word in title:
                return pid
        raise ProcessLookupError(f"{self.name} has no process {word}")

    def signal(self, number: signal.Signals, title: str = "") -> None:
        """Send a signal to its main process, or to the one with that title."""
        os.kill(self.titled(title) if title else self.main_pid(), number)

    def kill(self) -> None:
        """End all of it at once."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.main_pid(), signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait()

    def tail(self, characters: int = 3000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-characters:] if self.log.exists() else ""


class Kubelet:
    """Starts containers anew that have ended, or whose liveness probe has failed three times."""

    def __init__(self) -> None:
        self._watched: list[Party] = []
        self._probes: dict[str, _Probe] = {}
        self._stopping = threading.Event()
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kubelet", daemon=True)
        self._thread.start()

    def run(self, party: Party) -> None:
        """Start the party, and keep it running."""
        party.start()
        with self._guard:
            self._watched.append(party)
            if party.probe:
                self._probes[party.name] = _Probe(party, self._stopping)

    def forget(self, party: Party) -> None:
        """Leave the party as it is from now on."""
        with self._guard:
            self._watched = [each for each in self._watched if each is not party]
            if (probe := self._probes.pop(party.name, None)) is not None:
                probe.over.set()

    def close(self) -> None:
        """End every container."""
        self._stopping.set()
        self._thread.join()
        for party in self._watched:
            party.kill()

    def _run(self) -> None:
        while not self._stopping.wait(0.02):
            with self._guard:
                ended = [party for party in self._watched if not party.running]
                failed = [party for party in self._watched if self._dead(party)]
            for party in failed:
                party.kill()
            for party in ended:
                if self._stopping.wait(RESTART_SECONDS):
                    return
                party.restarts += 1
                with self._guard:
                    if party in self._watched:
                        party.start()
                        if party.name in self._probes:
                            self._probes[party.name].restarted()

    def _dead(self, party: Party) -> bool:
        probe = self._probes.get(party.name)
        return probe is not None and party.running and probe.failures >= PROBE_FAILURES


class _Probe:
    """Asks one container's liveness, beside all others; one that has not answered since its start is starting."""

    def __init__(self, party: Party, stopping: threading.Event) -> None:
        self.failures = 0
        self.over = threading.Event()
        self._party = party
        self._stopping = stopping
        self._up = False
        threading.Thread(target=self._run, name=f"probe-{party.name}", daemon=True).start()

    def restarted(self) -> None:
        self.failures, self._up = 0, False

    def _run(self) -> None:
        while not self._stopping.wait(PROBE_SECONDS) and not self.over.is_set():
            if _answers(self._party.probe, PROBE_SECONDS):
                self.failures, self._up = 0, True
            elif self._up and _reachable(self._party):
                self.failures += 1


def _reachable(party: Party) -> bool:
    """A kubelet sits beside its containers: what is cut off from others is not cut off from it, so that no probe fails for that."""
    return not party.plug.is_cut


def _answers(url: str, seconds: float) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=seconds):
            return True
    except (urllib.error.URLError, OSError):
        return False


def await_that(what: str, found: Callable[[], bool], seconds: float) -> float:
    """Seconds until it was so; TimeoutError when it never was."""
    began = time.monotonic()
    while not found():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.02)
    return time.monotonic() - began
