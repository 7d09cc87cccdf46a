"""The Lease that makes this process the only one that acts.

Whoever holds it renews it every few seconds. Others judge by their own clock: a record that has not changed for its whole duration is
dead. A holder that cannot renew within a deadline that is shorter than the duration must end, so two never overlap.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rolloutfleet_operator.cluster.gateway import Body, Gateway
from rolloutfleet_operator.cluster.kinds import ObjectRef, collection_path
from rolloutfleet_operator.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConflictError,
    LeaseLostError,
    NotFoundError,
    TransientError,
)


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Whose Lease it is and how long things take, in seconds."""

    name: str
    namespace: str
    identity: str
    duration: int
    renew: float
    deadline: float


class LeaseHolder:
    """Takes the Lease, keeps it, gives it back."""

    def __init__(self, gateway: Gateway, terms: LeaseTerms, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._gateway = gateway
        self._terms = terms
        self._monotonic = monotonic
        self._ref = ObjectRef("Lease", terms.namespace, terms.name)
        self._seen: tuple[str, str] = ("", "")
        self._seen_at = 0.0

    async def acquire(self, waiting: Callable[[str], None]) -> None:
        """Returns once this process holds the Lease; ``waiting`` is told of each other holder met."""
        told = ""
        while True:
            try:
                holder = await self._attempt()
            except (ConflictError, AlreadyExistsError, TransientError):
                holder = "unknown"
            if holder == self._terms.identity:
                return
            if holder != told:
                waiting(holder)
                told = holder
            await asyncio.sleep(self._terms.renew)

    async def hold(self) -> None:
        """Renews for ever.

        Raises:
            LeaseLostError: another holds the Lease, or it could not be renewed within the deadline.
        """
        renewed = self._monotonic()
        while True:
            await asyncio.sleep(self._terms.renew)
            left = renewed + self._terms.deadline - self._monotonic()
            try:
                async with asyncio.timeout(max(0.0, left)):
                    holder = await self._attempt()
            except (ConflictError, AlreadyExistsError, TransientError, TimeoutError) as error:
                if self._monotonic() - renewed >= self._terms.deadline:
                    message = f"Lease {self._terms.name} was not renewed for {self._terms.deadline:.0f} s: {error}"
                    raise LeaseLostError(message) from error
                continue
            if holder != self._terms.identity:
                raise LeaseLostError(f"Lease {self._terms.name} is held by {holder} now")
            renewed = self._monotonic()

    async def release(self) -> None:
        """Lets the next process begin at once; does nothing when the Lease is another's."""
        try:
            lease = await self._gateway.get(self._ref)
            if lease["spec"].get("holderIdentity") == self._terms.identity:
                lease["spec"]["holderIdentity"] = ""
                await self._gateway.replace(lease)
        except (NotFoundError, ConflictError, TransientError, AccessDeniedError):
            return  # it runs out by itself; an uninstall takes the rights away before the process ends

    async def _attempt(self) -> str:
        """The holder after one attempt to take or renew."""
        try:
            lease = await self._gateway.get(self._ref)
        except NotFoundError:
            path = collection_path("Lease", self._terms.namespace)
            manifest = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._terms.name, "namespace": self._terms.namespace},
                "spec": self._record({}),
            }
            await self._gateway.call("POST", path, str(self._ref), body=manifest)
            return self._terms.identity
        holder = str(lease["spec"].get("holderIdentity") or "")
        if holder not in ("", self._terms.identity) and not self._expired(lease):
            return holder
        await self._gateway.replace(lease | {"spec": self._record(lease["spec"])})
        return self._terms.identity

    def _expired(self, lease: Body) -> bool:
        spec = lease["spec"]
        seen = (str(spec.get("holderIdentity")), str(spec.get("renewTime")))
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._monotonic()
        return self._monotonic() - self._seen_at > float(spec.get("leaseDurationSeconds", self._terms.duration))

    def _record(self, before: dict[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        ours = before.get("holderIdentity") == self._terms.identity
        return {
            "acquireTime": before.get("acquireTime", now) if ours else now,
            "holderIdentity": self._terms.identity,
            "leaseDurationSeconds": self._terms.duration,
            "leaseTransitions": before.get("leaseTransitions", 0) + (0 if ours else 1),
            "renewTime": now,
        }
