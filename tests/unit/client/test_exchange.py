"""What ranks tell each other through the session's store, which is real here."""

import contextlib

import pytest

pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

from fakes.ranks import Ranks, deadline
from fakes.sharded_model import layout, manifest, weights
from rolloutfleet.sources import NamedTensors
from rolloutfleet.transport.exchange import (
    await_holdings,
    await_layouts,
    publish_holdings,
    publish_layout,
)

MANIFEST = manifest()


def test_layouts_and_holdings_reach_the_other_members_through_the_store() -> None:
    with contextlib.closing(Ranks(2)) as ranks:
        model = layout(1, 2)
        source = NamedTensors(weights(1))
        source.bind(MANIFEST)
        held = source.holdings(0, 1)
        publish_layout(ranks.stores[1], model)
        publish_holdings(ranks.stores[0], MANIFEST.digest(), held)
        assert await_layouts(ranks.stores[0], [model.digest] * 2, deadline()) == {model.digest: model}
        assert await_holdings(ranks.stores[1], MANIFEST.digest(), 1, deadline()) == (held,)
        with pytest.raises(TimeoutError, match="no member published layout/missing"):
            await_layouts(ranks.stores[0], ["missing"], deadline(0.1))
