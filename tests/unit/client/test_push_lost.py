"""A member that is killed frees the others: trainer and worker are processes of their own, over real gloo."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

TESTS = Path(__file__).parents[2]

MEMBER = f"""
import os, signal, sys
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent / "client")!r}]
import torch
from fakes.ranks import deadline
from rolloutfleet.layout.blocks import Block
from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet.layout.layout import Parameter, Placement, build_layout
from rolloutfleet.layout.holdings import whole_holdings
from rolloutfleet.sources import NamedTensors
from rolloutfleet.transport.gloo import connect_store, form_group, host_store
from rolloutfleet.transport.pulling import Puller
from rolloutfleet.transport.pushing import Pusher
from rolloutfleet.routing import hold_listening_socket
role, port = sys.argv[1], int(sys.argv[2])
count = 200 << 20
manifest = Manifest(tensors=(TensorSpec(name="w", dtype="uint8", shape=(count,)),))
whole = Block.contiguous(0, count)
layout = build_layout(manifest, [Parameter("w", "uint8", count)], [Placement(0, whole, 0, whole)], {{}}, "")
held = [whole_holdings(manifest)]
if role == "trainer":
    store = host_store(hold_listening_socket("127.0.0.1"), 60)
    print(store.store.port, flush=True)
    group = form_group(store, 1, 0, 2, 60)
    end = Pusher(group, manifest, {{1: layout}}, held, deadline=deadline())
    source = NamedTensors({{"w": torch.zeros(count, dtype=torch.uint8)}})
    source.bind(manifest)
    end.aim(source)
    act = lambda: end.push(source, deadline(60))
else:
    group = form_group(connect_store("127.0.0.1", port, 60), 1, 1, 2, 60)
    live = {{"w": torch.zeros(count, dtype=torch.uint8)}}
    end = Puller(group, manifest, layout, held, [layout.digest], live, deadline=deadline())
    begin = group._await
    def stop(what, work, until):
        # Everything of a step has been asked for by now, and comes.
        if what == "sending and receiving":
            os.kill(os.getpid(), signal.SIGSTOP)
        begin(what, work, until)
    if role == "stopping":
        group._await = stop
    act = lambda: end.pull(deadline(60), None)
print("prepared", flush=True)
sys.stdin.readline()
try:
    act()
    print("done", flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
"""


@contextlib.contextmanager
def prepared_pair(worker: str) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """A trainer and a worker of that role as processes, ready to move 200 MiB when they are told to."""

    def start(role: str, port: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MEMBER, role, port]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    trainer = start("trainer", "0")
    sides = (trainer, start(worker, trainer.stdout.readline().strip()))
    try:
        assert [side.stdout.readline().strip() for side in sides] == ["prepared"] * 2
        yield sides
    finally:
        for side in sides:
            side.kill()
            side.communicate()


def go(*sides: subprocess.Popen[str]) -> None:
    for side in sides:
        side.stdin.write("\n")
        side.stdin.flush()


def assert_freed(survivor: subprocess.Popen[str]) -> None:
    began = time.monotonic()
    assert survivor.stdout.readline().strip() in {"ConnectionError", "ConnectionAbortedError", "MemberGone"}
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("survivor", [0, 1], ids=["trainer", "worker"])
def test_a_peer_that_is_killed_before_it_takes_part_frees_the_other(survivor: int) -> None:
    with prepared_pair("worker") as sides:
        # Only the survivor goes on, so that it surely waits for its peer when that one dies.
        go(sides[survivor])
        sides[1 - survivor].kill()
        assert_freed(sides[survivor])


def test_a_receiver_that_is_killed_in_the_middle_of_a_send_frees_the_trainer() -> None:
    with prepared_pair("stopping") as (trainer, worker):
        go(trainer, worker)
        # It stands still with some of the bytes taken and the socket's buffers full.
        assert os.WIFSTOPPED(os.waitpid(worker.pid, os.WUNTRACED)[1])
        worker.kill()
        assert_freed(trainer)
