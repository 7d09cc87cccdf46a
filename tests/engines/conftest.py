"""Fleets on this machine: each is started once, for all modules that want it, and ended after the last of them."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
from tests.engines.hostfleet import HostFleet
from tests.engines.tinymodels import BUCKETED, EXPERTS, GROUPED, TIED, write_model

import rolloutfleet

FLEETS: Mapping[str, dict[str, Any]] = {
    "adapters": {"config": GROUPED, "engines": 2, "unpacked": True, "lora_rank": 8},
    "adapters on two ranks": {"config": GROUPED, "ranks": 2, "lora_rank": 8},
    "experts": {"config": EXPERTS},
    "in buckets": {"config": BUCKETED, "engines": 2},
    "tied, in place": {"config": TIED, "ranks": 2, "unpacked": True},
    "tied, packed": {"config": TIED, "ranks": 2},
    "three to be killed": {"config": GROUPED, "engines": 3, "unpacked": True},
    "two in place": {"config": GROUPED, "engines": 2, "unpacked": True},
}
MODULES: Mapping[str, tuple[str, ...]] = {
    "test_adapters": ("adapters",),
    "test_adapters_ranks": ("adapters on two ranks",),
    "test_one_fleet": ("in buckets",),
    "test_tensor_parallel": ("tied, packed",),
    "test_layout_ranks": ("tied, in place",),
    "test_experts": ("experts",),
    "test_sharded_trainers": ("experts", "tied, in place", "two in place"),
    "test_checkpoint_refit": ("two in place",),
    "test_reforming": ("three to be killed",),
    "test_rolling": ("two in place",),
    "test_layout_refit": ("two in place",),
}
"""Which fleets a module wants, by the name of its file, in the order in which the modules run: few fleets are up at any time.

The last one refits without the sync job, which would not know its engines again.
"""


class Fleets:
    """The fleets that the modules of one run want, one use after another."""

    def __init__(self, modules: Iterable[str], folders: pytest.TempPathFactory) -> None:
        self._uses = [(module, name) for module in modules for name in MODULES[module]]
        self._folders = folders
        self._launched: dict[str, HostFleet] = {}
        self._started: set[str] = set()

    def ready(self, module: str, name: str) -> HostFleet:
        """The fleet, all engines Ready, with a sync job of the policy that tests begin with.

        Fleets without a later use have ended, and that of the next use is coming up: a start keeps one core busy, a test seldom two.
        """
        at = self._uses.index((module, name))
        left = [each for _, each in self._uses[at:]]
        for ended in self._launched.keys() - set(left):
            self._launched.pop(ended).close()
        for near in left[:2]:
            if near not in self._launched:
                folder = self._folders.mktemp(near.replace(", ", "-").replace(" ", "-"))
                shape = dict(FLEETS[near])
                self._launched[near] = HostFleet(folder, write_model(folder / "model", shape.pop("config")), **shape)
        fleet = self._launched[name]
        if name in self._started:
            fleet.start_sync()
        else:
            self._started.add(name)
            fleet.start()
        return fleet

    def close(self) -> None:
        with ExitStack() as stack:
            for fleet in self._launched.values():
                stack.callback(fleet.close)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {module: place for place, module in enumerate(MODULES)}
    items.sort(key=lambda item: order.get(item.path.stem, -1))


@pytest.fixture(scope="session")
def fleets(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleets]:
    modules = dict.fromkeys(item.path.stem for item in request.session.items if item.path.stem in MODULES)
    fleets = Fleets(modules, tmp_path_factory)
    yield fleets
    fleets.close()


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, fleets: Fleets) -> HostFleet:
    """The module's only fleet, all engines Ready."""
    (name,) = MODULES[request.path.stem]
    return fleets.ready(request.path.stem, name)


@pytest.fixture
def trainer(fleet: HostFleet) -> Iterator[rolloutfleet.Fleet]:
    """This process as a trainer, for one test."""
    with fleet.connect() as connected:
        yield connected
