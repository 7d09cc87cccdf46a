"""The pods of one engine: who is taken in, who is refused and why, and what each is told."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rolloutfleet.contract.worker import Locality
from rolloutfleet_worker.followers import Followers
from rolloutfleet_worker.rank.place import MisplacedError, Place, rank_in_engine
from rolloutfleet_worker.ranks import Ranks
from rolloutfleet_worker.settings import SettingsError, read_settings
from rolloutfleet_worker.spreading import (
    HEADER_POD_RANK,
    HEADER_START,
    LINK_ROUTE,
    RANK_ROUTE,
    Hello,
    Start,
    common_locality,
    find_difference,
)

START = Start(identity="start-1", address="10.0.0.1", port=29501)


def hello(pod_rank: int = 0, **fields) -> Hello:
    given = {
        "fleet_uid": "u",
        "engine": 0,
        "pod_name": f"f-0-{pod_rank}-0",
        "pod_rank": pod_rank,
        "pods": 2,
        "ranks": 4,
        "arguments": "digest",
        "environment": {"NCCL_CUMEM_ENABLE": "1"},
        "locality": Locality(host=f"host-{pod_rank}", memory="m"),
    }
    return Hello.model_validate(given | fields)


@pytest.mark.scenario("F23")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ""),
        ({"fleet_uid": "v"}, "pod f-0-1-0 is of the fleet with uid v, and f-0-0-0 u"),
        ({"engine": 3}, "pod f-0-1-0 is of engine 3, and f-0-0-0 0"),
        ({"pods": 3}, "pod f-0-1-0 takes the engine to have pods: 3, and f-0-0-0 2"),
        ({"pod_rank": 2}, "pod f-0-1-0 has pod rank 2, and followers of an engine of 2 pods have 1 to 1"),
        ({"arguments": "other"}, "pod f-0-1-0 was given other arguments of vLLM than f-0-0-0"),
        ({"environment": {}}, "NCCL_CUMEM_ENABLE is not set in pod f-0-1-0 and '1' in f-0-0-0"),
    ],
)
def test_a_pod_that_is_none_of_the_engines_is_told_what_differs(fields, words):
    told = find_difference(hello(), hello(**({"pod_rank": 1, "pod_name": "f-0-1-0"} | fields)))
    assert told.startswith(words)
    assert bool(told) == bool(words)


def test_what_holds_for_all_pods_is_told_and_nothing_else():
    assert common_locality([hello(0).locality, hello(1).locality]) == Locality(host="", memory="m")


def test_followers_run_ranks_alone_and_all_meet_at_the_leader():
    leader, follower = START.arguments(2, 0), START.arguments(2, 1)
    assert set(follower) - set(leader) == {"--node-rank=1", "--headless"}
    assert {"--nnodes=2", "--master-addr=10.0.0.1", "--master-port=29501"} <= set(leader) & set(follower)


@pytest.mark.scenario("F23")
def test_a_process_whose_groups_and_configuration_name_other_ranks_ends_before_it_takes_a_weight():
    parallel = type("Parallel", (), {"data_parallel_index": 1, "world_size": 4, "rank": 3})
    assert rank_in_engine(parallel, Place(data=1, pipeline=1, tensor=1, stages=2, width=2)) == 7
    assert rank_in_engine(parallel, None) == 7
    with pytest.raises(MisplacedError, match="which is rank 6, and its configuration says rank 7"):
        rank_in_engine(parallel, Place(data=1, pipeline=1, tensor=0, stages=2, width=2))


def test_pods_that_cannot_be_of_one_engine_are_refused_at_start(tmp_path):
    environment = {
        "ROLLOUTFLEET_TOKEN_FILE": str(tmp_path / "none"),
        "ROLLOUTFLEET_RANKS": "3",
        "ROLLOUTFLEET_PODS": "2",
        "ROLLOUTFLEET_POD_RANK": "2",
    }
    with pytest.raises(SettingsError) as refused:
        read_settings(environment)
    for words in (
        "ROLLOUTFLEET_RANKS is 3, which does not divide evenly among ROLLOUTFLEET_PODS=2",
        "ROLLOUTFLEET_POD_RANK is 2, and an engine of ROLLOUTFLEET_PODS=2 ends with 1",
        "ROLLOUTFLEET_LEADER is not set",
        "ROLLOUTFLEET_POD_IP is not set",
    ):
        assert words in str(refused.value)


class Leader:
    """A leader's side, served."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[str] = asyncio.Queue()
        """Why the engine cannot go on, or is to end."""
        self.ranks = Ranks(4, self.told.put_nowait, 2)
        self.followers = Followers(hello(), START, self.ranks, self.told.put_nowait, self.told.put_nowait)

    async def reason(self) -> str:
        return await asyncio.wait_for(self.told.get(), 5)


@pytest.fixture
async def leader() -> AsyncIterator[Leader]:
    made = Leader()
    application = web.Application()
    application.add_routes(made.followers.routes())
    async with TestServer(application) as server, aiohttp.ClientSession(server.make_url("/")) as made.session:
        yield made
        await made.followers.close()


async def link(leader: Leader, said: Hello) -> aiohttp.ClientWebSocketResponse:
    socket = await leader.session.ws_connect(LINK_ROUTE)
    await socket.send_json(said.model_dump(mode="json"))
    return socket


async def test_nothing_starts_before_every_pod_is_there_and_then_all_are_told(leader: Leader):
    assert leader.followers.absent == "the engine's pods of rank 1 are not there yet"
    socket = await link(leader, hello(1))
    await asyncio.wait_for(leader.followers.complete.wait(), 5)
    await leader.followers.start()
    assert Start.parse(await socket.receive_json(timeout=5)) == START


async def test_a_pod_of_another_revision_is_refused_for_good(leader: Leader):
    socket = await link(leader, hello(1, arguments="other"))
    told = await socket.receive_json(timeout=5)
    assert told["lasting"]
    assert "the pods of an engine are of one revision" in told["refused"]
    assert leader.followers.absent


@pytest.mark.scenario("F72")
@pytest.mark.parametrize(
    ("end", "reason"),
    [("closes", "its launcher is gone, or cannot be reached"), ("says", "vLLM ended with exit code 1: out of memory")],
)
async def test_a_pod_that_is_lost_ends_the_engine_and_is_named(leader: Leader, end: str, reason: str):
    socket = await link(leader, hello(1))
    await asyncio.wait_for(leader.followers.complete.wait(), 5)
    await leader.followers.start()
    if end == "says":
        await socket.send_json({"ended": reason})
    else:
        await socket.close()
    assert await leader.followers.last_words() == f"pod f-0-1-0 of the engine: {reason}"
    assert await leader.reason() == f"pod f-0-1-0 of the engine: {reason}"


async def test_a_launcher_that_starts_anew_while_the_engine_runs_ends_the_engine(leader: Leader):
    await link(leader, hello(1))
    await asyncio.wait_for(leader.followers.complete.wait(), 5)
    await leader.followers.start()
    again = await link(leader, hello(1))
    await again.receive_json(timeout=5)
    assert await leader.reason() == "pod f-0-1-0 of the engine: its launcher has started anew"


async def test_a_follower_that_is_to_end_has_the_whole_engine_leave(leader: Leader):
    socket = await link(leader, hello(1))
    await socket.send_json({"leaving": "the node is drained"})
    assert await leader.reason() == "pod f-0-1-0 of the engine: the node is drained"


@pytest.mark.scenario("F64")
async def test_ranks_of_an_earlier_start_and_of_another_pods_numbers_are_not_taken_in(leader: Leader):
    await link(leader, hello(1))
    await asyncio.wait_for(leader.followers.complete.wait(), 5)
    await leader.followers.start()
    with pytest.raises(aiohttp.WSServerHandshakeError):
        await leader.session.ws_connect(RANK_ROUTE, headers={HEADER_START: "start-0", HEADER_POD_RANK: "1"})
    socket = await leader.session.ws_connect(RANK_ROUTE, headers={HEADER_START: "start-1", HEADER_POD_RANK: "1"})
    await socket.send_json({"hello": {"rank": 1}})
    told = "a process of pod rank 1 says that it is local rank 1; that pod holds the ranks 2 to 3"
    assert await leader.reason() == told
