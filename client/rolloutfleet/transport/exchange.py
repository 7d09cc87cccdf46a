"""What trainer and workers tell each other before a transfer, through the session's store: layouts by their digest, holdings by rank."""

import threading
from collections.abc import Iterable

from rolloutfleet.layout.holdings import Holdings
from rolloutfleet.layout.layout import Layout
from rolloutfleet.transport.store import SessionStore, await_value, publish


def publish_layout(store: SessionStore, layout: Layout) -> None:
    """Makes a layout readable by its digest for as long as the session lives."""
    publish(store.store, f"layout/{layout.digest}", layout.encode())


def await_layouts(
    store: SessionStore, digests: Iterable[str], deadline: float, cancelled: threading.Event | None = None
) -> dict[str, Layout]:
    """The layouts with these digests, by digest, once every one is published.

    Raises ValueError for one that is damaged or published under another's digest, and otherwise what
    :func:`rolloutfleet.transport.store.await_value` raises.
    """
    layouts = {}
    for digest in sorted(set(digests)):
        layout = Layout.decode(await_value(store.store, f"layout/{digest}", deadline, cancelled or threading.Event()))
        if layout.digest != digest:
            raise ValueError(f"the layout published as {digest} has digest {layout.digest}")
        layouts[digest] = layout
    return layouts


def publish_holdings(store: SessionStore, manifest_digest: str, holdings: Holdings) -> None:
    """Makes known what a trainer rank holds of a manifest, replacing what it said of it before."""
    publish(store.store, f"holdings/{manifest_digest}/{holdings.rank}", holdings.encode())


def await_holdings(
    store: SessionStore,
    manifest_digest: str,
    trainer_ranks: int,
    deadline: float,
    cancelled: threading.Event | None = None,
) -> tuple[Holdings, ...]:
    """What every trainer rank holds of a manifest, by rank, once all have said so; raises as :func:`await_layouts`."""
    found = []
    for rank in range(trainer_ranks):
        key = f"holdings/{manifest_digest}/{rank}"
        holdings = Holdings.decode(await_value(store.store, key, deadline, cancelled or threading.Event()))
        if holdings.rank != rank:
            raise ValueError(f"the holdings published for trainer rank {rank} are those of rank {holdings.rank}")
        found.append(holdings)
    return tuple(found)


__all__ = ["await_holdings", "await_layouts", "publish_holdings", "publish_layout"]
