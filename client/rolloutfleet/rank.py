"""One process of a trainer in a session: it joins, prepares and sends when told to, and leaves."""

import sys
import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING

from rolloutfleet.contract.trainer import TrainerJoin, TrainerPrepare, TrainerSend
from rolloutfleet.delivery import Cargo, Delivery, Seat, Sent, join_epoch

if TYPE_CHECKING:
    from rolloutfleet.layout.holdings import Holdings

Order = TrainerJoin | TrainerPrepare | TrainerSend


def is_cut_off(error: BaseException) -> bool:
    """Whether this is how a trainer rank that is sound itself sees a party of its group that is gone or stands still."""
    return isinstance(error, ConnectionError | TimeoutError)


def lost_ranks(error: BaseException) -> tuple[int, ...]:
    """The rank of the group whose process is probably gone, where the error tells."""
    rank = getattr(error, "rank", None) if isinstance(error, ConnectionError) else None
    return () if rank is None else (rank,)


class TrainerRank:
    """A seat, and the delivery of the current epoch; one thread works for it, any thread may make it leave."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self._guard = threading.Lock()
        self._epoch = 0
        self._delivery: Delivery | None = None
        self._addresses: Hashable = None
        self._holdings: Holdings | None = None
        self._manifest = ""

    def load(self, cargo: Cargo) -> bool:
        """Counts the cargo's tensors by the team's manifest, tells the workers in the store what this rank holds of it, and directs the
        delivery of the current epoch at where they lie now, while the engines serve. What this thread has queued on its current CUDA
        streams is done when this returns: other threads move the bytes, on streams that know nothing of these.

        Returns whether workers may have planned by something else that this rank told them of the same manifest before. Raises
        ValueError naming a tensor that no longer fits, ConnectionError when the store is lost.
        """
        cargo.source.bind(cargo.manifest)
        _finish_queued_work()
        moved = self._tell_holdings(cargo)
        with self._guard:
            delivery = self._delivery
        if delivery is not None and not moved:
            delivery.aim(cargo)
        return moved

    def _tell_holdings(self, cargo: Cargo) -> bool:
        addresses = cargo.source.addresses()
        same = self._manifest == cargo.digest
        if same and addresses == self._addresses:
            return False
        holdings = cargo.source.holdings(self.seat.rank, self.seat.ranks)
        moved = same and holdings != self._holdings
        if not same or moved:
            self._publish(cargo, holdings)
        self._manifest, self._addresses, self._holdings = cargo.digest, addresses, holdings
        return moved

    def perform(self, order: Order, cargo: Cargo, cancelled: threading.Event) -> Sent | None:
        """Does what the sync job orders, within its deadline; what was sent, for :class:`TrainerSend`.

        Raises what the transport raises: ConnectionError and its kinds, TimeoutError, ValueError for tensors that no longer fit.
        """
        if isinstance(order, TrainerJoin):
            self._join(order, cancelled)
            return None
        delivery = self._delivery
        if delivery is None or self._epoch != order.epoch:
            at = f"epoch {self._epoch}" if delivery is not None else "no group"
            raise ConnectionError(f"told to act in epoch {order.epoch}, but this trainer rank is in {at}")
        if isinstance(order, TrainerPrepare):
            delivery.prepare(order, cargo, cancelled)
            return None
        return delivery.send(order, cargo)

    def leave(self, reason: str) -> None:
        """Leaves the group; whatever is blocked in it raises at once."""
        with self._guard:
            delivery, self._delivery = self._delivery, None
        if delivery is not None:
            delivery.end(reason)

    def _join(self, order: TrainerJoin, cancelled: threading.Event) -> None:
        self.leave("a new epoch begins")
        delivery = join_epoch(order, self.seat, cancelled)
        with self._guard:
            if not cancelled.is_set():
                self._delivery, self._epoch = delivery, order.epoch
                return
        delivery.end("the refit ended while the group was forming")

    def _publish(self, cargo: Cargo, holdings: "Holdings") -> None:
        from rolloutfleet.transport.exchange import publish_holdings

        holdings.check(cargo.manifest)
        publish_holdings(self.seat.store, cargo.digest, holdings)


def _finish_queued_work() -> None:
    """Waits for this thread's current CUDA streams; whoever moves bytes waits for the default ones by itself."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    for device in range(torch.cuda.device_count()):
        stream = torch.cuda.current_stream(device)
        if stream != torch.cuda.default_stream(device):
            stream.synchronize()
