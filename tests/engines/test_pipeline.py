"""An engine with two pipeline stages, each in a pod of its own.

vLLM's build for CPUs dies at the first request of a pipeline, so the engine is brought up and refitted, and every rank's live weights are
held against a fresh load. Experts over data parallel ranks are not here: that build has no collective for them, not even for the empty
steps with which such an engine pauses.
"""

from collections.abc import Iterator

import pytest
from tests.engines.hostfleet import HostFleet
from tests.engines.refitting import refit
from tests.engines.tinymodels import TIED, checkpoint_tensors, make_model, named_tensors, write_model

from rolloutfleet.contract.policy import Transport


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostFleet]:
    """Ready: one engine, PP = 2 over two pods."""
    folder = tmp_path_factory.mktemp("stages")
    made = HostFleet(folder, write_model(folder / "model", TIED), ranks=2, stages=2, pods=2)
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.mark.row("B06")
@pytest.mark.scenario("F15")
@pytest.mark.parametrize("transport", [Transport.GLOO, Transport.LAYOUT])
def test_each_rank_comes_to_hold_what_a_fresh_load_of_the_version_gives_it(fleet: HostFleet, transport: Transport):
    fleet.start_sync(transport=transport, verify="Full")
    live = []
    with fleet.connect() as trainer:
        for seed, names in ((11, named_tensors), (12, checkpoint_tensors), (11, named_tensors)):
            live.append(refit(fleet, trainer, names(make_model(fleet.model, seed))).live_digest)
    assert live[0] == live[2] != live[1]
    assert fleet.engines[0].report().ranks == 2
