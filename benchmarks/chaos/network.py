"""A network of the run's own: every party in a namespace with one address, all on one bridge, as pods are.

The supervisor enters a namespace first, so that nothing is seen by, or left to, the machine. A party's namespace is held open by a process
that sleeps, as a pod's is by its pause container, and outlives the party's own processes. Needs root and Linux's namespaces.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

_BRIDGE = "chaos"
_INSIDE = "CHAOS_IN_NAMESPACE"
_UNSHARE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Processes too: whatever becomes of the supervisor, nothing that it has started outlives it."""
_PREFIX = "10.213"
_NUMBERS = count(1)
"""Of all parties that this process has had: no address is used twice."""


def refused() -> str:
    """Why a run cannot have namespaces of its own here; empty when it can, or is in them."""
    if os.environ.get(_INSIDE):
        return ""
    if missing := [tool for tool in ("ip", "nsenter", "tc", "unshare") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed (iproute2, util-linux)"
    tried = subprocess.run([*_UNSHARE, "true"], check=False, capture_output=True, text=True)
    return f"namespaces are not permitted here: {tried.stderr.strip()}" if tried.returncode else ""


def enter(module: str, arguments: Sequence[str]) -> None:
    """Run the module anew in namespaces of its own, in place of this program; returns when it is in them already."""
    if not os.environ.get(_INSIDE):
        os.environ[_INSIDE] = "1"
        os.execvp(_UNSHARE[0], [*_UNSHARE, sys.executable, "-m", module, *arguments])


class Network:
    """The bridge, with the supervisor's own address on it."""

    def __init__(self) -> None:
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", _BRIDGE, "type", "bridge", "stp_state", "0", "forward_delay", "0")
        _run("ip", "addr", "add", f"{_PREFIX}.255.254/16", "dev", _BRIDGE)
        _run("ip", "link", "set", _BRIDGE, "up")

    def plug(self, *, megabits: int = 0) -> "Plug":
        """A new namespace on the bridge; what leaves it is throttled to ``megabits`` a second where given."""
        return Plug(next(_NUMBERS), megabits)

    def close(self) -> None:
        _run("ip", "link", "del", _BRIDGE)


class Plug:
    """One party's namespace and its place on the bridge."""

    def __init__(self, number: int, megabits: int) -> None:
        self.address = f"{_PREFIX}.{number // 250}.{number % 250 + 1}"
        self.is_cut = False
        self._link = f"party{number}"
        self._pause = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], start_new_session=True)
        self._await_own_network()
        pid = str(self._pause.pid)
        _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", pid)
        _run("ip", "link", "set", self._link, "master", _BRIDGE, "up")
        inside = self.command_prefix()
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(*inside, "ip", "addr", "add", f"{self.address}/16", "dev", "eth0")
        _run(*inside, "ip", "link", "set", "eth0", "up")
        if megabits:
            _run(*inside, *_throttle("eth0", megabits))

    def command_prefix(self) -> list[str]:
        """What a command begins with that runs in here."""
        return ["nsenter", f"--net=/proc/{self._pause.pid}/ns/net", "--"]

    def cut(self) -> None:
        """Nothing goes in or out any more, and nobody is told."""
        self.is_cut = True
        _run("ip", "link", "set", self._link, "nomaster")

    def mend(self) -> None:
        _run("ip", "link", "set", self._link, "master", _BRIDGE)
        self.is_cut = False

    def slow(self, megabits: int) -> None:
        """What comes in is throttled."""
        _run(*_throttle(self._link, megabits))

    def quicken(self) -> None:
        _run("tc", "qdisc", "del", "dev", self._link, "root")

    def close(self) -> None:
        _run("ip", "link", "del", self._link)
        os.killpg(self._pause.pid, signal.SIGKILL)
        self._pause.wait()

    def _await_own_network(self) -> None:
        mine = Path("/proc/self/ns/net").stat().st_ino
        while Path(f"/proc/{self._pause.pid}/ns/net").stat().st_ino == mine:
            if self._pause.poll() is not None:
                raise OSError("no network namespace could be made for a party")


def _throttle(device: str, megabits: int) -> list[str]:
    return f"tc qdisc replace dev {device} root tbf rate {megabits}mbit burst 64kb latency 50ms".split()


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
