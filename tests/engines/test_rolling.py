"""Two real engines under a steady stream of requests while versions roll from one to the other: nobody is refused, nothing is mixed."""

import threading
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import pytest
from tests.engines.hostfleet import HostFleet, Launched, await_that
from tests.engines.refitting import PROMPTS, TOKENS
from tests.engines.tinymodels import greedy_tokens, make_model, named_tensors

import rolloutfleet
from rolloutfleet.contract.policy import PauseMode, RollingPolicy, Staging, Strategy, Transport

Answer = tuple[str, str, list[int], int]
"""Engine, prompt, tokens, and the version that the answer names."""


def give(fleet: HostFleet, trainer: rolloutfleet.Fleet, seed: int) -> tuple[str, ...]:
    """Publishes the version of this seed; the engines that took it from the trainer."""
    tensors = named_tensors(make_model(fleet.model, seed))
    result = trainer.refit(tensors, version=fleet.version + 1, timeout=120)
    fleet.version = result.version
    return result.members


def await_rolled(fleet: HostFleet) -> None:
    for engine in fleet.engines:
        await_that(f"{engine.name} has version {fleet.version}", lambda e=engine: e.report().version == fleet.version)
        engine.await_ready()


class Stream:
    """Asks every engine without a break until it is left; whatever one of them refuses is raised then."""

    def __init__(self, fleet: HostFleet) -> None:
        self.answers: list[Answer] = []
        self._over = threading.Event()
        self._clients = ThreadPoolExecutor(max_workers=2 * len(fleet.engines))
        self._asking = [
            self._clients.submit(self._ask, engine, prompt) for engine in fleet.engines for prompt in PROMPTS[:2]
        ]

    def _ask(self, engine: Launched, prompt: str) -> None:
        while not self._over.is_set():
            try:
                self.answers.append((engine.name, prompt, *engine.generate(prompt, TOKENS)))
            except urllib.error.HTTPError as refusal:
                raise AssertionError(f"{engine.name} refused: {refusal.read().decode()}") from refusal

    def await_more(self, count: int) -> None:
        """Return after so many further answers, or when a client has ended."""
        wanted = len(self.answers) + count
        await_that(
            f"{wanted} answers", lambda: len(self.answers) >= wanted or any(each.done() for each in self._asking)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._clients.shutdown()
        for each in self._asking:
            each.result()


@pytest.mark.parametrize("staging", Staging)
def test_versions_roll_under_load_without_a_refusal_and_every_answer_is_of_one_version(
    fleet: HostFleet, staging: Staging
):
    rolling = RollingPolicy(max_unavailable=1, max_stale_seconds=120)
    fleet.start_sync(
        transport=Transport.AUTO, strategy=Strategy.ROLLING, rolling=rolling, staging=staging, pause=PauseMode.WAIT
    )
    seeds = {}
    with fleet.connect() as trainer:
        give(fleet, trainer, 60)
        seeds[fleet.version] = 60
        await_rolled(fleet)
        with Stream(fleet) as stream:
            stream.await_more(8)
            for seed in (61, 62, 63):
                assert len(give(fleet, trainer, seed)) == 1, "the trainer sends to one wave"
                seeds[fleet.version] = seed
            await_rolled(fleet)
            stream.await_more(8)
    models = {version: make_model(fleet.model, seed) for version, seed in seeds.items()}
    expected = {
        (version, prompt): greedy_tokens(model, fleet.model, prompt, TOKENS)
        for version, model in models.items()
        for prompt in PROMPTS[:2]
    }
    mixed = [answer for answer in stream.answers if answer[2] != expected[answer[3], answer[1]]]
    assert mixed == []
    heard = {name: {version for other, *_, version in stream.answers if other == name} for name, *_ in stream.answers}
    ends = {min(seeds), max(seeds)}
    assert [ends <= heard[engine.name] for engine in fleet.engines] == [True, True], "each engine has gone all the way"
    assert set().union(*heard.values()) == set(seeds)
