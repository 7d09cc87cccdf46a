"""The engine that is explored does what the worker's real verbs do: the same calls, in any order, are answered alike."""

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.engine import FakeEngine
from fakes.explored.engine import Engine, end_join, end_receive, handle, start_engine
from fakes.explored.world import MANIFEST, new_member
from rolloutfleet.contract.policy import CachePolicy, PauseMode, Transport, Wire
from rolloutfleet.contract.problems import ProblemError
from rolloutfleet.contract.worker import (
    Abort,
    Admit,
    Call,
    Check,
    Commit,
    Join,
    Pause,
    Prepare,
    Receive,
    Rendezvous,
    Resume,
    WorkerReport,
)

LONG = 600.0
MEETING = Rendezvous(host="10.1.1.1", port=29500)
VERBS = ["admit", "check", "join", "prepare", "pause", "receive", "stage", "commit", "resume", "abort"]


def _make(verb: str, epoch: int, version: int) -> Call:
    header: dict[str, Any] = {"fleet_uid": "fleet-uid", "pod_uid": "uid-1", "instance": "i1", "epoch": epoch}
    match verb:
        case "admit":
            return Admit(**header, version=version)
        case "check":
            return Check(**header, manifest=MANIFEST, deadline_seconds=LONG)
        case "join":
            where = {"transport": Transport.LAYOUT, "wire": Wire.GLOO, "rendezvous": MEETING, "deadline_seconds": LONG}
            return Join(**header, **where, trainer_ranks=1, rank_offset=1, world_size=2)
        case "prepare":
            return Prepare(
                **header, manifest_digest=MANIFEST.digest(), layouts=("x",), staged=True, deadline_seconds=LONG
            )
        case "pause":
            return Pause(**header, mode=PauseMode.KEEP, deadline_seconds=LONG)
        case "receive" | "stage":
            key, staged = MANIFEST.digest(), verb == "stage"
            return Receive(
                **header,
                version=version,
                manifest_digest=key,
                staged=staged,
                deadline_seconds=LONG,
                hold_seconds=LONG,
            )
        case "commit":
            return Commit(**header, version=version, cache=CachePolicy.RESET)
        case "resume":
            return Resume(**header)
    return Abort(**header, reason="asked to")


def _ask_explored(engine: Engine, call: Call, digest: str) -> tuple[Engine, Any]:
    after, answer = handle(engine, call, 1, 0.0)
    if after.work is None:
        return after, answer
    return end_join(after) if isinstance(call, Join) else end_receive(after, digest)


async def _ask_real(engine: FakeEngine, call: Call, digest: str) -> Any:
    asked = asyncio.ensure_future(engine.handle(call))
    for _ in range(50):  # turns of the loop, until the answer is there or waits for the transfer's end
        await asyncio.sleep(0)
    engine.arrive(digest)
    try:
        return await asked
    except ProblemError as refusal:
        return refusal


def _essence(answer: Any) -> Any:
    if isinstance(answer, ProblemError):
        return answer.problem.code
    if isinstance(answer, WorkerReport):
        return answer.state, answer.epoch, answer.version, answer.version_in_flight, answer.admitted, answer.staged
    fields = {"received_digests", "cache_reset", "state", "version", "ranks"}
    return type(answer), {name: getattr(answer, name) for name in sorted(fields) if hasattr(answer, name)}


calls = st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=14)


@settings(max_examples=200, deadline=None)
@given(calls=calls, stubborn=st.booleans())
def test_explored_and_real_engines_answer_alike(calls: list[tuple[str, int, int]], stubborn: bool):
    asyncio.run(_compare(calls, stubborn))


async def _compare(calls: list[tuple[str, int, int]], stubborn: bool) -> None:
    member = new_member(0, 1)
    real = FakeEngine(member, instance="i1", calibrated=True, cache_answer=not stubborn)
    explored = start_engine(member, 1)
    if stubborn:
        explored = Engine(member, 1, explored.fence, cache_answer=False)
    checked = _make("check", 0, 1)
    await _ask_real(real, checked, "")
    explored, _ = _ask_explored(explored, checked, "")
    for number, (verb, epoch, version) in enumerate(calls):
        call, digest = _make(verb, epoch, version), f"bytes {number}"
        explored, mine = _ask_explored(explored, call, digest)
        theirs = await _ask_real(real, call, digest)
        assert _essence(mine) == _essence(theirs), (verb, mine, theirs)
        assert _without_words(explored.fence) == _without_words(real.fence), verb
        assert explored.weights == real.weights, verb
        assert explored.paused == real.vllm.paused, verb
        assert explored.stale_cache == real.vllm.stale_cache, verb
    real._pod._release_hold()


def _without_words(fence: Any) -> tuple[Any, ...]:
    return fence.state, fence.epoch, fence.joined, fence.version, fence.version_in_flight, fence.beside, fence.admitted
