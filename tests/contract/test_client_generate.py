"""Generation with the client against engines that speak the OpenAI completions API as vLLM 0.32 does, over real sockets."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator

import pytest
from aiohttp import web

import rolloutfleet
from rolloutfleet.contract.names import API_PREFIX, HEADER_ENGINE, HEADER_WEIGHT_VERSION
from rolloutfleet.contract.policy import Transport
from rolloutfleet.contract.trainer import FleetView, MemberView, Phase
from rolloutfleet.contract.worker import WorkerState
from rolloutfleet.errors import DeadlineExceeded, GenerationFailed

TOKEN = "s3cret"


class Loop:
    """An event loop in a thread; serves applications on ports of 127.0.0.1."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._runners: list[web.AppRunner] = []

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def serve(self, app: web.Application) -> int:
        async def start() -> int:
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._runners.append(runner)
            return runner.addresses[0][1]

        return self.run(start())

    def close(self) -> None:
        for runner in self._runners:
            self.run(runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class FakeEngine:
    """Counts up from a prompt's last token; remembers what it was asked."""

    def __init__(self, name: str, version: int = 3) -> None:
        self.name = name
        self.version = version
        self.requests: list[dict] = []
        self.answer: Callable[[], web.Response] | None = None
        self.gate: asyncio.Event | asyncio.Barrier | None = None
        self.asked = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.asked.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.answer is not None:
            return self.answer()
        choices = [self._choice(index, prompt, body) for index, prompt in enumerate(body["prompt"])]
        headers = {HEADER_ENGINE: self.name, HEADER_WEIGHT_VERSION: str(self.version)}
        # vLLM may finish prompts in any order.
        return web.json_response({"choices": choices[::-1]}, headers=headers)

    @staticmethod
    def _choice(index: int, prompt, body: dict) -> dict:
        last = prompt[-1] if isinstance(prompt, list) else len(prompt)
        tokens = [last + step for step in range(1, body["max_tokens"] + 1)]
        return {
            "index": index,
            "text": f"{prompt}+{len(tokens)}",
            "finish_reason": "length",
            "token_ids": tokens if body["return_token_ids"] else None,
            "logprobs": {"token_logprobs": [-float(token) for token in tokens]},
        }


class Setup:
    """A fleet of fake engines behind a sync job that only describes it."""

    def __init__(self, loop: Loop, engines: list[FakeEngine]) -> None:
        self.engines = engines
        self.ports = [loop.serve(engine.app()) for engine in engines]
        app = web.Application()
        app.router.add_get(f"{API_PREFIX}/fleet", self._fleet)
        self.address = f"http://127.0.0.1:{loop.serve(app)}"
        self.ready = set(range(len(engines)))

    async def _fleet(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        view = FleetView(
            fleet="quickstart",
            namespace="default",
            fleet_uid="u",
            model="tiny",
            phase=Phase.READY,
            epoch=1,
            version=3,
            transport=Transport.GLOO,
            engines=len(self.engines),
            members=tuple(
                MemberView(
                    engine=index,
                    pod_name=engine.name,
                    address=f"127.0.0.1:{port + 1}",
                    ready=index in self.ready,
                    state=WorkerState.SERVING if index in self.ready else WorkerState.STARTING,
                    version=3,
                    ranks=1,
                )
                for index, (engine, port) in enumerate(zip(self.engines, self.ports, strict=True))
            ),
            endpoints=tuple(f"http://127.0.0.1:{self.ports[index]}" for index in sorted(self.ready)),
        )
        return web.Response(text=view.model_dump_json(by_alias=True), content_type="application/json")


@pytest.fixture
def loop() -> Iterator[Loop]:
    running = Loop()
    yield running
    running.close()


@pytest.fixture
def setup(loop: Loop) -> Setup:
    return Setup(loop, [FakeEngine("quickstart-0-0-0"), FakeEngine("quickstart-1-0-0", version=4)])


@pytest.fixture
def fleet(setup: Setup) -> Iterator[rolloutfleet.Fleet]:
    with rolloutfleet.connect(setup.address, token=TOKEN) as connected:
        yield connected


@pytest.mark.row("A43")
@pytest.mark.row("A46")
def test_a_batch_is_split_unevenly_and_merged_in_order_with_engine_and_version_of_each(setup: Setup, fleet) -> None:
    sampling = rolloutfleet.Sampling(max_new_tokens=2, temperature=0.5, top_k=7)
    batch = fleet.generate([[1, 2, 3], [10, 0, 0], [20, 21, 0]], [3, 1, 2], pad_token_id=99, sampling=sampling)
    assert batch == {
        "output_ids": [[1, 2, 3, 4, 5], [10, 11, 12, 99, 99], [20, 21, 22, 23, 99]],
        "generation_lengths": [2, 2, 2],
        "unpadded_sequence_lengths": [5, 3, 4],
        "logprobs": [[0.0, 0.0, 0.0, -4.0, -5.0], [0.0, -11.0, -12.0, 0.0, 0.0], [0.0, 0.0, -22.0, -23.0, 0.0]],
        "finish_reasons": ["length"] * 3,
        "engines": ["quickstart-0-0-0", "quickstart-0-0-0", "quickstart-1-0-0"],
        "weight_versions": [3, 3, 4],
    }
    asked = [engine.requests for engine in setup.engines]
    assert [[request["prompt"] for request in requests] for requests in asked] == [[[[1, 2, 3], [10]]], [[[20, 21]]]]
    assert asked[0][0] == {
        "model": "tiny",
        "prompt": [[1, 2, 3], [10]],
        "max_tokens": 2,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 7,
        "ignore_eos": False,
        "logprobs": 0,
        "return_token_ids": True,
    }


@pytest.mark.row("A44")
def test_text_comes_back_in_the_order_of_the_prompts(fleet) -> None:
    batch = fleet.generate_text(["one", "three", "two"], greedy=True, sampling=rolloutfleet.Sampling(max_new_tokens=1))
    assert batch["texts"] == ["one+1", "three+1", "two+1"]
    assert batch["engines"] == ["quickstart-0-0-0", "quickstart-0-0-0", "quickstart-1-0-0"]


@pytest.mark.row("A43")
def test_engines_are_asked_at_the_same_time(loop: Loop, setup: Setup, fleet) -> None:
    async def gate() -> asyncio.Barrier:
        return asyncio.Barrier(2)

    both = loop.run(gate())
    for engine in setup.engines:
        engine.gate = both
    assert fleet.generate([[1], [2]], [1, 1], timeout=10)["generation_lengths"] == [16, 16]


@pytest.mark.row("A43")
def test_an_empty_batch_asks_nobody(setup: Setup, fleet) -> None:
    assert fleet.generate([], [])["output_ids"] == []
    assert fleet.generate_text([])["texts"] == []
    assert not any(engine.requests for engine in setup.engines)


@pytest.mark.row("A43")
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            lambda: web.json_response({"error": {"message": "half of version 4"}}, status=503),
            r"engine quickstart-1-0-0 at http://127.0.0.1:\d+ answered 503: half of version 4",
        ),
        (lambda: web.Response(text="gone", status=502), "engine quickstart-1-0-0 .* answered 502: gone"),
        (
            lambda: web.json_response({"choices": []}),
            "engine quickstart-1-0-0 .* did not answer as an engine of this fleet",
        ),
        (
            lambda: web.json_response({"choices": []}, headers={HEADER_ENGINE: "x", HEADER_WEIGHT_VERSION: "3"}),
            "engine quickstart-1-0-0 .* answered 0 of 1 prompts",
        ),
    ],
    ids=["fenced", "broken", "stranger", "short"],
)
def test_an_engine_that_fails_is_named_and_its_words_are_kept(setup: Setup, fleet, answer, words: str) -> None:
    setup.engines[1].answer = answer
    setup.engines[1].gate = setup.engines[0].asked
    with pytest.raises(GenerationFailed, match=words):
        fleet.generate([[1], [2]], [1, 1])


def test_an_engine_that_is_gone_is_named(loop: Loop, setup: Setup, fleet) -> None:
    loop.run(loop._runners[0].cleanup())
    with pytest.raises(GenerationFailed, match=r"engine quickstart-0-0-0 .* cannot be asked to generate: .*refused"):
        fleet.generate([[1]], [1])


def test_an_engine_that_does_not_answer_in_time_is_named(loop: Loop, setup: Setup, fleet) -> None:
    async def gate() -> asyncio.Event:
        return asyncio.Event()

    setup.engines[0].gate = loop.run(gate())
    with pytest.raises(DeadlineExceeded, match=r"engine quickstart-0-0-0 .* did not answer 1 prompts in time"):
        fleet.generate([[1], [2]], [1, 1], timeout=0.3)


@pytest.mark.row("A51")
@pytest.mark.row("A27")
def test_only_engines_that_are_ready_with_the_committed_version_are_asked(setup: Setup, fleet) -> None:
    setup.ready = {1}
    assert fleet.endpoints() == [f"http://127.0.0.1:{setup.ports[1]}/v1"]
    assert set(fleet.generate([[1], [2]], [1, 1])["engines"]) == {"quickstart-1-0-0"}
    setup.ready = set()
    with pytest.raises(
        GenerationFailed, match=r"no Ready engine with version 3: quickstart-0-0-0 is Starting; quickstart-1-0-0"
    ):
        fleet.generate([[1]], [1])


@pytest.mark.row("A07")
@pytest.mark.row("A08")
@pytest.mark.parametrize("rule", [{"top_k": 0}, {"top_p": 0.0}])
def test_a_sampling_rule_is_broken_before_anything_is_sent(setup: Setup, fleet, rule: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(rule))):
        fleet.generate([[1]], [1], sampling=rolloutfleet.Sampling(**rule))
    assert not any(engine.requests for engine in setup.engines)


def test_requests_are_plain_json(setup: Setup, fleet) -> None:
    fleet.generate([[1]], [1], sampling=rolloutfleet.Sampling(stop=("a",), stop_token_ids=(5,), seed=1))
    assert json.loads(json.dumps(setup.engines[0].requests[0]))["stop"] == ["a"]
