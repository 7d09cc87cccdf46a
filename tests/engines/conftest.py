"""Fleets on this machine, one a module, so that four engine starts serve all tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engines.hostfleet import HostFleet
from tests.engines.tinymodels import write_model
from transformers import PreTrainedConfig

StartFleet = Callable[..., HostFleet]


@pytest.fixture(scope="module")
def start_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartFleet]:
    fleets: list[HostFleet] = []

    def start(config: PreTrainedConfig, **shape: int) -> HostFleet:
        folder: Path = tmp_path_factory.mktemp("fleet")
        fleets.append(HostFleet(folder, write_model(folder / "model", config), **shape))
        fleets[-1].start()
        return fleets[-1]

    yield start
    for fleet in fleets:
        fleet.close()
