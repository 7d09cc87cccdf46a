"""One rank's part in lending and borrowing: who meets whom, and whether what was borrowed is what was lent."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rolloutfleet.contract.adapter import HeldAdapter
from rolloutfleet.contract.names import ENV_POD_IP
from rolloutfleet.contract.policy import Wire
from rolloutfleet.contract.worker import Rendezvous
from rolloutfleet.routing import hold_listening_socket
from rolloutfleet.transport.store import SessionStore, connect_store, host_store
from rolloutfleet_worker.adapter_files import ENV_ADAPTERS, TENSORS, version_folder, write_version
from rolloutfleet_worker.rank import peer
from rolloutfleet_worker.rank.broadcasting import TRANSFER_ERRORS
from rolloutfleet_worker.rank.link import RankError
from rolloutfleet_worker.rank.live_digest import live_digest
from rolloutfleet_worker.rank.live_tensors import kernel_tensors
from rolloutfleet_worker.rank.peer_copy import PeerCopy, copy_bytes
from rolloutfleet_worker.wire import Frame


class Lending:
    """Lends or borrows one copy at a time; any thread may end it."""

    def __init__(self, model: torch.nn.Module, device: torch.device, rank: int) -> None:
        self._model = model
        self._device = device
        self._rank = rank
        self._guard = threading.Lock()
        self._pair: peer.Pair | None = None
        self._offered: SessionStore | None = None

    def offer(self, timeout: float) -> Frame:
        """Where the borrower's ranks find this engine: a store on a socket that is held from now on.

        Raises:
            RankError: kernels keep weights out of sight, or this machine's address is not known.
        """
        self._tensors()
        address = os.environ.get(ENV_POD_IP, "")
        try:
            listening = hold_listening_socket(address)
            port = listening.getsockname()[1]
            self._offered = host_store(listening, timeout)
        except (OSError, RuntimeError, ValueError) as error:
            raise RankError(f"cannot listen for a peer at {ENV_POD_IP}={address!r}: {error}") from error
        return {"host": address, "port": port}

    def lend(self, body: Frame, cancelled: threading.Event) -> Frame:
        """Send everything, once the borrower has come.

        Raises:
            RankError: the borrower was lost or did not come in time, or the lending was cancelled.
        """
        timeout = float(body["timeout_seconds"])
        deadline = time.monotonic() + timeout
        rendezvous = Rendezvous.model_validate(body["rendezvous"])
        with self._guard:
            offered, self._offered = self._offered, None
        if cancelled.is_set():
            raise RankError(f"local rank {self._rank} was told to let go before it had begun to lend")
        tensors = self._tensors() + [self._file(held) for held in _adapters(body)]
        try:
            store = offered or connect_store(rendezvous.host, rendezvous.port, timeout, cancelled)
            with self._paired(store, peer.LENDER, cancelled) as pair:
                digest = live_digest(self._model, cancelled=pair.cancelled)
                peer.lend(pair, tensors, digest, Wire(body["wire"]), self._device, deadline)
        except TRANSFER_ERRORS as error:
            raise RankError(f"local rank {self._rank} lent in vain: {type(error).__name__}: {error}") from error
        return {}

    def copy_bytes(self) -> int:
        """What a second copy of all that is lent and borrowed takes; RankError as :meth:`offer`."""
        return copy_bytes(self._named())

    def borrow(self, body: Frame, cancelled: threading.Event) -> Frame:
        """Overwrite everything, and compare what lies here then with what the lender computes with.

        Raises:
            RankError: the lender was lost or holds something else; ``touched`` once bytes may have come.
        """
        return self._borrow(body, cancelled, None)

    def borrow_beside(self, body: Frame, cancelled: threading.Event) -> tuple[Frame, PeerCopy]:
        """The same into a second copy, which is returned; no live weight is touched.

        Raises:
            RankError: as :meth:`borrow`, or there is no room.
        """
        beside = PeerCopy(self._named(), self._device)
        try:
            return self._borrow(body, cancelled, beside), beside
        except RankError as error:
            raise RankError(str(error)) from error

    def _borrow(self, body: Frame, cancelled: threading.Event, beside: PeerCopy | None) -> Frame:
        timeout = float(body["timeout_seconds"])
        began = time.monotonic()
        rendezvous = Rendezvous.model_validate(body["rendezvous"])
        adapters = _adapters(body)
        files = [torch.empty(held.nbytes, dtype=torch.uint8, device=self._device) for held in adapters]
        tensors = (self._tensors() if beside is None else list(beside.tensors.values())) + files
        touched = False
        try:
            store = connect_store(rendezvous.host, rendezvous.port, timeout, cancelled)
            with self._paired(store, peer.BORROWER, cancelled) as pair:
                expected = pair.await_digest(began + timeout)
                touched = True
                nbytes = peer.borrow(pair, tensors, Wire(body["wire"]), self._device, began + timeout)
                received = time.monotonic()
                instead = None if beside is None else beside.tensors
                live = live_digest(self._model, cancelled=pair.cancelled, instead=instead)
            for held, file in zip(adapters, files, strict=True):
                _write(held, file)
        except TRANSFER_ERRORS as error:
            raise RankError(
                f"local rank {self._rank} borrowed in vain: {type(error).__name__}: {error}", touched=touched
            ) from error
        if live != expected:
            raise RankError(
                f"local rank {self._rank} holds live weights of digest {live} after borrowing, the lender {expected}",
                touched=True,
            )
        return {
            "tensors": len(tensors),
            "nbytes": nbytes,
            "received_digest": live,
            "live_digest": live,
            "receive_seconds": received - began,
            "load_seconds": time.monotonic() - received,
        }

    def let_go(self) -> None:
        """End what is under way; the other side sees it too."""
        with self._guard:
            pair, self._pair = self._pair, None
            self._offered = None
        if pair is not None:
            pair.end("told to let go")

    def _file(self, held: HeldAdapter) -> torch.Tensor:
        data = (_folder(held) / TENSORS).read_bytes()
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in self._named()]

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        try:
            return kernel_tensors(self._model)
        except ValueError as error:
            raise RankError(f"local rank {self._rank}: {error}") from error

    @contextmanager
    def _paired(self, store: SessionStore, side: int, cancelled: threading.Event) -> Iterator[peer.Pair]:
        pair = peer.Pair(store, self._rank, side, cancelled)
        with self._guard:
            self._pair = pair
        try:
            yield pair
        finally:
            with self._guard:
                self._pair = None
            pair.end("over")


def _adapters(body: Frame) -> list[HeldAdapter]:
    """Whose files are copied beside the tensors, as runs of bytes, in this order on both sides."""
    return [HeldAdapter.model_validate(held) for held in body["adapters"]]


def _folder(held: HeldAdapter) -> Path:
    return version_folder(Path(os.environ[ENV_ADAPTERS]), held.spec.name, held.version)


def _write(held: HeldAdapter, file: torch.Tensor) -> None:
    """Puts a borrowed adapter where vLLM will load it; ValueError when it is not the one that was lent."""
    data = file.cpu().numpy().tobytes()
    _, sha256 = write_version(_folder(held), held.spec, lambda path: path.write_bytes(data))
    if sha256 != held.sha256:
        raise ValueError(
            f"the file of adapter {held.spec.name}, version {held.version}, has digest {sha256} after borrowing, the lender's {held.sha256}"
        )
