"""A fleet of fake workers around the real sync job, for each test anew."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from fakes.syncjob import Fleet
from fakes.trainer import FakeTrainer

StartFleet = Callable[..., Awaitable[Fleet]]


@pytest.fixture
async def start_fleet() -> AsyncIterator[StartFleet]:
    fleets: list[Fleet] = []

    async def start(*, ranks: int = 1, admitted: bool = True, **fields: Any) -> Fleet:
        fleet = Fleet(**fields)
        fleets.append(fleet)
        await fleet.start(ranks)
        if admitted:
            await fleet.until_admitted()
        return fleet

    yield start
    for fleet in fleets:
        await fleet.close()


@pytest.fixture
async def fleet(start_fleet: StartFleet) -> Fleet:
    """Two engines that are refitted both or not at all, so that whatever is lost ends the refit."""
    return await start_fleet(min_ready=2)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def trainer(fleet: Fleet, http: aiohttp.ClientSession) -> FakeTrainer:
    return FakeTrainer(http, fleet.url, fleet.wire)
