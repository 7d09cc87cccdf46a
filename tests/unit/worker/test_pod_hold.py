"""A pause that nobody ends: the worker ends it by itself, and tells whoever calls next whose it was and for how long."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fakes.pod import Pod

WORDS = (
    "the sync job of fleet f let the pause or the staged version of epoch 1 pass its 0.1 s, so the worker left the group; "
    "see whether the sync job was killed, hangs or was cut off, then refit again"
)
Ask = Callable[[Pod], Awaitable[tuple[int, dict]]]


async def forgotten(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the pod paused for a tenth of a second, with no further word."""
    monkeypatch.setattr("rolloutfleet_worker.pod.PAUSE_GRACE_SECONDS", 0.05)
    await pod.joined()
    for rank in pod.ranks:
        rank.aborted.clear()
    assert (await pod.call("pause", mode="Keep", deadlineSeconds=0.05))[0] == 200
    assert all(await asyncio.gather(*(asyncio.to_thread(rank.aborted.wait, 10) for rank in pod.ranks)))
    await pod.pod._rescue
    assert pod.pod.fence.state == "Serving"


@pytest.mark.parametrize(
    "ask",
    [lambda pod: pod.receive(), lambda pod: pod.stage(), lambda pod: pod.call("commit", version=1, cache="Reset")],
    ids=["receive", "stage", "commit"],
)
async def test_calls_after_a_pause_that_ran_out_are_told_whose_it_was_how_long_and_what_to_do(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, ask: Ask
):
    await forgotten(pod, monkeypatch)
    status, problem = await ask(pod)
    assert status == 409
    assert WORDS in problem["message"]


async def test_the_next_group_begins_without_that_word(pod: Pod, monkeypatch: pytest.MonkeyPatch):
    await forgotten(pod, monkeypatch)
    await pod.joined()
    assert pod.pod.fence.gave_up == ""
