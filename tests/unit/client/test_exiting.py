"""An interpreter that ends stops its threads inside torch first, or at least does not wait for them long."""

import subprocess
import sys
import time
from pathlib import Path

CLIENT = Path(__file__).parents[3] / "client"


def run(script: str) -> subprocess.CompletedProcess[str]:
    opening = f"import os, sys, threading, time\nsys.path.insert(0, {str(CLIENT)!r})\nfrom rolloutfleet.exiting import start_thread\n"
    return subprocess.run(
        [sys.executable, "-c", opening + script], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_thread_is_told_to_stop_and_ends_before_the_interpreter() -> None:
    script = "stop = threading.Event()\nstart_thread('t', lambda: (stop.wait(), print('ended')), stop.set)\n"
    ended = run(script)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")


def test_a_thread_that_does_not_stop_holds_nobody_up() -> None:
    began = time.monotonic()
    assert run("start_thread('t', threading.Event().wait, lambda: None)").returncode == 0
    assert time.monotonic() - began < 30


def test_a_thread_that_has_ended_is_not_told_to_stop() -> None:
    ended = run("start_thread('t', lambda: None, lambda: print('stopped')).join()")
    assert (ended.returncode, ended.stdout) == (0, "")


def test_a_forked_process_leaves_the_threads_of_its_parent_alone() -> None:
    script = (
        "stop = threading.Event()\n"
        "start_thread('t', stop.wait, lambda: (print('stopped', flush=True), stop.set()))\n"
        "child = os.fork()\n"
        "if child == 0: sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print('parent', flush=True)\n"
    )
    assert run(script).stdout.split() == ["parent", "stopped"]


def test_a_stop_that_fails_keeps_no_other_thread_from_being_stopped() -> None:
    script = (
        "def fail(): raise OSError('no')\n"
        "start_thread('a', threading.Event().wait, fail)\n"
        "for name in 'bc':\n"
        "    stop = threading.Event()\n"
        "    start_thread(name, lambda stop=stop, name=name: (stop.wait(), os.write(1, b'ended;')), stop.set)\n"
        "start_thread('d', threading.Event().wait, fail)\n"
    )
    ended = run(script)
    assert (ended.returncode, ended.stdout) == (0, "ended;ended;")
    assert "OSError: no" in ended.stderr
