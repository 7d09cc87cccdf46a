"""Transfers by layout over a group."""

import torch

from rolloutfleet.transport.pacing import serving_rate
from rolloutfleet.transport.pulling import Puller
from rolloutfleet_worker.rank.transfer import Arrived, Order, Plan, Take, Transfer


class PulledTransfer(Transfer):
    """Making it exchanges a few bytes with the trainer; raises what :class:`~rolloutfleet.transport.pulling.Puller` does."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        holdings = plan.agree()
        destinations = plan.destinations(plan.staging)
        self._aimed(destinations)
        self._puller = Puller(
            plan.member.group,
            plan.known.manifest,
            self.layout,
            holdings,
            plan.layouts,
            destinations,
            bytes_per_second=serving_rate(plan.member.group.device) if plan.staged else None,
            deadline=plan.deadline,
        )

    def close(self) -> None:
        """Buckets go with this object; the group is left by the membership."""

    def _pull(self, destinations: dict[str, torch.Tensor], order: Order, take: Take) -> Arrived:
        if self._moved(destinations):
            self._puller.aim(destinations)
            self._aimed(destinations)
        try:
            pulled = self._puller.pull(order.deadline, take)
        finally:
            self.landed = self._puller.landed
        return Arrived(pulled.nbytes, pulled.digest)
