"""A fleet on this machine for each module that wants one: four engine starts serve all tests."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
from tests.engines.hostfleet import HostFleet
from tests.engines.tinymodels import BUCKETED, EXPERTS, GROUPED, TIED, write_model

import rolloutfleet

FLEETS: Mapping[str, dict[str, Any]] = {
    "test_adapters": {"config": GROUPED, "engines": 2, "unpacked": True, "lora_rank": 8},
    "test_adapters_ranks": {"config": GROUPED, "ranks": 2, "lora_rank": 8},
    "test_experts": {"config": EXPERTS},
    "test_layout_ranks": {"config": TIED, "ranks": 2, "unpacked": True},
    "test_layout_refit": {"config": GROUPED, "engines": 2, "unpacked": True},
    "test_one_fleet": {"config": BUCKETED, "engines": 2},
    "test_tensor_parallel": {"config": TIED, "ranks": 2},
}
"""By the name of the module."""


@pytest.fixture(scope="session")
def launched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, HostFleet]]:
    """The fleets of the modules in this run, coming up side by side: one start keeps one core busy."""
    wanted = sorted({item.path.stem for item in request.session.items} & FLEETS.keys())
    fleets: dict[str, HostFleet] = {}
    with ExitStack() as stack:
        for name in wanted:
            folder = tmp_path_factory.mktemp(name)
            shape = dict(FLEETS[name])
            fleets[name] = HostFleet(folder, write_model(folder / "model", shape.pop("config")), **shape)
            stack.callback(fleets[name].close)
        yield fleets


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, launched: dict[str, HostFleet]) -> Iterator[HostFleet]:
    """The module's fleet, all engines Ready."""
    fleet = launched[request.path.stem]
    fleet.start()
    yield fleet
    fleet.close()


@pytest.fixture
def trainer(fleet: HostFleet) -> Iterator[rolloutfleet.Fleet]:
    """This process as a trainer, for one test."""
    with fleet.connect() as connected:
        yield connected
