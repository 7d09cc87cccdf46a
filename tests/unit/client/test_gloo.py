"""Groups of real processes: what ends a broadcast, and how soon. Runs where torch is installed."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

from rolloutfleet.routing import hold_listening_socket  # noqa: E402
from rolloutfleet.transport.gloo import Group, form_group  # noqa: E402
from rolloutfleet.transport.store import SessionStore, connect_store, host_store  # noqa: E402

CLIENT = Path(__file__).parents[3] / "client"
LARGE = 1 << 28
"""More than socket buffers hold: a sender blocks until the others receive."""

ECHO = f"""
import sys, time
sys.path.insert(0, {str(CLIENT)!r})
import torch
from rolloutfleet.transport.gloo import connect_store, form_group
group = form_group(connect_store("127.0.0.1", int(sys.argv[1]), 60), 1, 1, 2, 60)
until = time.monotonic() + 60
numbers = [torch.empty(1000, dtype=torch.int64) for _ in range(20)]
with group.grouped(until):
    for number in numbers:
        group.receive(number, 0, until)
print([int(number[0]) for number in numbers], flush=True)
for number in numbers:
    group.send(number + 1, 0, until)
sys.stdin.readline()
"""

MEMBER = f"""
import sys, time
sys.path.insert(0, {str(CLIENT)!r})
import torch
from rolloutfleet.transport.gloo import connect_store, form_group
port, rank, world_size = map(int, sys.argv[1:4])
group = form_group(connect_store("127.0.0.1", port, 60), 1, rank, world_size, 60)
print("joined", flush=True)
sys.stdin.readline()
buffer = torch.empty({LARGE}, dtype=torch.uint8)
try:
    group.broadcast(buffer, 0, time.monotonic() + 60)
    print("received", int(buffer.min()), int(buffer.max()), flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
sys.stdin.readline()
"""


class Members:
    """Ranks 1 and up as processes; each receives when told to."""

    def __init__(self, port: int, world_size: int) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", MEMBER, str(port), str(rank), str(world_size)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(1, world_size)
        ]

    def receive(self, *ranks: int) -> None:
        for rank in ranks:
            stdin = self.processes[rank - 1].stdin
            stdin.write("\n")
            stdin.flush()

    def line(self, rank: int) -> str:
        return self.processes[rank - 1].stdout.readline().strip()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def store() -> SessionStore:
    return host_store(hold_listening_socket("127.0.0.1"), 60)


@pytest.fixture
def members(store: SessionStore) -> Iterator[Members]:
    started = Members(store.store.port, 3)
    yield started
    started.close()


@pytest.fixture
def group(store: SessionStore, members: Members) -> Iterator[Group]:
    formed = form_group(store, 1, 0, 3, 60)
    assert [members.line(rank) for rank in (1, 2)] == ["joined", "joined"]
    yield formed
    formed.close()


class Broadcast:
    """A broadcast from rank 0 in a thread of its own."""

    def __init__(self, group: Group, timeout: float = 60) -> None:
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(group, timeout), daemon=True)
        self._thread.start()

    def _run(self, group: Group, timeout: float) -> None:
        try:
            group.broadcast(torch.full((LARGE,), 7, dtype=torch.uint8), 0, time.monotonic() + timeout)
        except OSError as error:
            self.error = error

    def ends_within(self, seconds: float) -> Exception | None:
        self._thread.join(seconds)
        assert not self._thread.is_alive()
        return self.error


def test_every_member_gets_the_bytes_of_rank_zero(group: Group, members: Members) -> None:
    members.receive(1, 2)
    assert Broadcast(group).ends_within(30) is None
    assert [members.line(rank) for rank in (1, 2)] == ["received 7 7"] * 2


@pytest.mark.row("B17")
@pytest.mark.scenario("F03")
def test_an_abort_unblocks_the_sender_and_every_member_that_receives(group: Group, members: Members) -> None:
    members.receive(1)
    members.processes[1].send_signal(signal.SIGSTOP)
    sending = Broadcast(group)
    group.abort("the sync job said so")
    error = sending.ends_within(5)
    assert isinstance(error, ConnectionAbortedError)
    assert "the sync job said so" in str(error)
    assert members.line(1) in {"ConnectionError", "MemberGone"}
    with pytest.raises(ConnectionAbortedError, match="the group of epoch 1 has ended"):
        group.broadcast(torch.zeros(1), 0, time.monotonic() + 1)


def test_a_member_that_dies_ends_the_broadcast(group: Group, members: Members) -> None:
    sending = Broadcast(group)
    members.processes[1].kill()
    assert isinstance(sending.ends_within(5), ConnectionError)


def test_a_member_that_stands_still_ends_it_at_the_timeout(group: Group, members: Members) -> None:
    members.processes[1].send_signal(signal.SIGSTOP)
    assert isinstance(Broadcast(group, timeout=0.5).ends_within(5), TimeoutError)


@pytest.mark.scenario("F01")
def test_ranks_that_do_not_come_are_named(store: SessionStore) -> None:
    with pytest.raises(TimeoutError, match="no word from rank 1, 2 of 3"):
        form_group(store, 1, 0, 3, 0.3)


def test_waiting_for_members_can_be_cancelled(store: SessionStore) -> None:
    cancelled = threading.Event()
    cancelled.set()
    began = time.monotonic()
    with pytest.raises(ConnectionAbortedError, match="joining epoch 2 as rank 0 was cancelled"):
        form_group(store, 2, 0, 2, 60, cancelled)
    assert time.monotonic() - began < 5


def test_a_rank_is_taken_once_per_epoch(store: SessionStore) -> None:
    with pytest.raises(TimeoutError):
        form_group(store, 3, 0, 2, 0.1)
    with pytest.raises(ValueError, match="rank 0 of epoch 3 was joined by two processes"):
        form_group(store, 3, 0, 2, 0.1)
    with pytest.raises(ValueError, match="rank 2 does not exist in a world of 2"):
        form_group(store, 3, 2, 2, 0.1)


@pytest.mark.scenario("F01")
def test_a_store_that_cannot_be_reached_is_named_with_advice() -> None:
    with hold_listening_socket("127.0.0.1") as free:
        port = free.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"trainer's store at 127.0.0.1:{port} was not reached .* advertise="):
        connect_store("127.0.0.1", port, 0.5)


@pytest.fixture
def pair(store: SessionStore) -> Iterator[tuple[Group, subprocess.Popen[str]]]:
    command = [sys.executable, "-c", ECHO, str(store.store.port)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    formed = form_group(store, 1, 0, 2, 60)
    yield formed, other
    formed.close()
    other.kill()
    other.communicate()


def test_messages_between_two_ranks_keep_their_order(pair: tuple[Group, subprocess.Popen[str]]) -> None:
    group, other = pair
    until = time.monotonic() + 60
    with group.grouped(until):
        for number in range(20):
            group.send(torch.full((1000,), number, dtype=torch.int64), 1, until)
    assert other.stdout.readline().strip() == str(list(range(20)))
    answer = torch.empty(1000, dtype=torch.int64)
    for number in range(20):
        group.receive(answer, 1, until)
        assert answer.unique().tolist() == [number + 1]


@pytest.mark.parametrize("end", ["abort", "kill", "deadline"])
def test_a_message_that_never_comes_is_waited_for_until_something_ends_it(
    pair: tuple[Group, subprocess.Popen[str]], end: str
) -> None:
    group, other = pair
    timer = threading.Timer(0.2, {"abort": group.abort, "kill": other.kill, "deadline": time.monotonic}[end])
    timer.start()
    began = time.monotonic()
    kind = {"abort": ConnectionAbortedError, "kill": ConnectionError, "deadline": TimeoutError}[end]
    with pytest.raises(kind):
        group.receive(torch.empty(8), 1, began + (1 if end == "deadline" else 60))
    assert time.monotonic() - began < 5
    timer.join()


@pytest.mark.scenario("F19")
def test_members_that_wait_in_gloos_own_start_are_freed_when_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, over = threading.Barrier(3), threading.Event()

    def stuck(*_: object) -> object:
        entered.wait(20)
        over.wait(60)
        raise RuntimeError("connectFullMesh timed out")

    monkeypatch.setattr("rolloutfleet.transport.gloo.ProcessGroupGloo", type("Stuck", (), {"__new__": stuck}))
    monkeypatch.setattr("rolloutfleet.transport.gloo.ProcessGroupGloo.create_device", lambda **_: None, raising=False)
    monkeypatch.setattr(
        "rolloutfleet.transport.gloo.ProcessGroupGloo._Options", lambda: type("Options", (), {})(), raising=False
    )
    listening = hold_listening_socket("127.0.0.1")
    port = listening.getsockname()[1]
    store = host_store(listening, 30)
    cancelled = threading.Event()
    errors: dict[int, BaseException] = {}

    def join(rank: int, at: SessionStore, event: threading.Event) -> None:
        try:
            form_group(at, 1, rank, 2, 60, event)
        except OSError as error:
            errors[rank] = error

    threads = [
        threading.Thread(target=join, args=(0, store, threading.Event())),
        threading.Thread(target=join, args=(1, connect_store("127.0.0.1", port, 30), cancelled)),
    ]
    for thread in threads:
        thread.start()
    entered.wait(20)
    began = time.monotonic()
    cancelled.set()
    for thread in threads:
        thread.join(20)
    assert time.monotonic() - began < 5
    assert isinstance(errors[1], ConnectionAbortedError)
    assert isinstance(errors[0], ConnectionError)
    over.set()
