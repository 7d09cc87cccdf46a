"""What a rank lets go of: the trainer's memory when told to or when it leaves, and a loan that nobody wants any more."""

import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rolloutfleet_worker.rank.lending import Lending
from rolloutfleet_worker.rank.link import RankError, RankLink
from rolloutfleet_worker.rank.receiver import Receiver
from rolloutfleet_worker.rank.shared_transfer import SharedTransfer
from rolloutfleet_worker.wire import encode, receive_frame

LEND = {"rendezvous": {"host": "127.0.0.1", "port": 1}, "wire": "Gloo", "adapters": [], "timeout_seconds": 30}


class Transfer:
    """Counts how often it was closed; receives what the test says."""

    def __init__(self, receive=dict) -> None:
        self.closed = 0
        self._receive = receive

    def receive(self, load, staging, order):
        return self._receive()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Receiver:
    monkeypatch.setattr("rolloutfleet_worker.rank.receiver.KnownAdapters", lambda *_: None)
    return Receiver(torch.nn.Linear(2, 2), None, torch.device("cpu"), 0)


def test_a_rank_that_unmaps_stays_prepared(receiver: Receiver):
    transfer = receiver._transfer = Transfer()
    assert receiver.unmap() == {}
    assert (transfer.closed, receiver._transfer) == (1, transfer)


def test_a_rank_that_leaves_unmaps(receiver: Receiver):
    transfer = receiver._transfer = Transfer()
    receiver.abort()
    assert (transfer.closed, receiver._transfer) == (1, None)
    assert receiver.unmap() == {}


def test_a_transfer_that_is_left_while_it_copies_is_closed_when_it_has_ended(receiver: Receiver):
    seen: list[int] = []

    def receive():
        receiver.abort()
        seen.append(transfer.closed)
        return {}

    transfer = receiver._transfer = Transfer(receive)
    receiver._run(transfer, None, None, None)
    assert (seen, transfer.closed) == ([0], 1)


class Stream:
    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_a_copy_that_fails_is_waited_for_before_anybody_hears_of_it(monkeypatch: pytest.MonkeyPatch):
    transfer = SharedTransfer.__new__(SharedTransfer)
    stream = transfer._stream = Stream()
    monkeypatch.setattr(torch.cuda, "stream", lambda _: torch.no_grad())
    with pytest.raises(ValueError, match="the loader failed"), transfer._on_stream():
        raise ValueError("the loader failed")
    assert stream.waited == 1


def test_a_loan_that_was_cancelled_before_it_began_is_not_begun():
    lending = Lending(torch.nn.Linear(2, 2), torch.device("cpu"), 0)
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(RankError, match="told to let go before it had begun to lend"):
        lending.lend(LEND, cancelled)


def test_a_loan_that_is_let_go_of_before_the_borrower_is_met_ends(monkeypatch: pytest.MonkeyPatch):
    cancelled = threading.Event()

    def connect(host, port, timeout, given):
        cancelled.set()
        assert given is cancelled
        return SimpleNamespace(of_epoch=lambda _: None)

    def digest(model, cancelled):
        assert cancelled.is_set()
        raise ConnectionAbortedError("not wanted any more")

    monkeypatch.setattr("rolloutfleet_worker.rank.lending.connect_store", connect)
    monkeypatch.setattr("rolloutfleet_worker.rank.lending.live_digest", digest)
    with pytest.raises(RankError, match="lent in vain: ConnectionAbortedError: not wanted any more"):
        Lending(torch.nn.Linear(2, 2), torch.device("cpu"), 0).lend(LEND, cancelled)


class Operations:
    """A rank of which only lending matters; another order may be under way at the same time."""

    rank = 0

    def __init__(self) -> None:
        self.began, self.ended = threading.Event(), threading.Event()

    def describe(self):
        return {}

    def lend(self, body, cancelled):
        self.began.set()
        assert cancelled.wait(20)
        self.ended.set()
        return {}

    def free(self):
        return {}

    def let_go(self) -> None: ...

    def abort(self) -> None: ...

    def __getattr__(self, name):
        return lambda *_: {}


def test_letting_go_cancels_a_loan_that_has_not_met_its_borrower(tmp_path: Path):
    operations = Operations()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "ranks.sock"))
        listening.listen()
        link = RankLink(str(tmp_path / "ranks.sock"), operations)
        link.start()
        launcher, _ = listening.accept()
        with launcher:
            assert "hello" in receive_frame(launcher)
            launcher.sendall(encode({"id": 1, "op": "lend", "body": LEND}))
            assert operations.began.wait(20)
            launcher.sendall(encode({"id": 2, "op": "let-go", "body": {}}))
            assert operations.ended.wait(20)
            assert sorted(receive_frame(launcher)["id"] for _ in range(2)) == [1, 2]
            link.stop()
