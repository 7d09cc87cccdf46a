"""Two engines whose weights lie where the loader puts them, as on GPUs: refits in place, staged, swapped under load, borrowed."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.driving import SECONDS, Epoch, Refused, call
from tests.engines.hostfleet import HostFleet, Launched, await_that
from tests.engines.refitting import PROMPTS, TOKENS, assert_generates, refit, told_of
from tests.engines.tinymodels import greedy_choices, greedy_tokens, make_model, named_tensors

from rolloutfleet.contract.policy import Transport, Wire
from rolloutfleet.contract.worker import Locality, WorkerState


def test_auto_takes_the_memory_that_trainer_and_engines_share(fleet: HostFleet):
    fleet.start_sync(transport=Transport.AUTO)
    with fleet.connect() as trainer:
        results = []
        for seed in (1, 2):
            results.append(refit(fleet, trainer, named_tensors(make_model(fleet.model, seed))))
            assert_generates(fleet, seed)
    assert {result.transport for result in results} == {Transport.COLOCATED}
    assert results[1].staged
    reason = "Colocated through shared memory: trainer and engines share the memory of one host"
    assert results[1].reason == told_of(fleet, results[1])["reason"] == reason


def test_auto_sends_by_layout_from_a_host_whose_memory_engines_do_not_see(
    fleet: HostFleet, monkeypatch: pytest.MonkeyPatch
):
    elsewhere = Locality(host="another boot/another namespace", memory="another boot/another namespace/another mount")
    monkeypatch.setattr("rolloutfleet.session.locality", lambda: elsewhere)
    fleet.start_sync(transport=Transport.AUTO)
    with fleet.connect() as trainer:
        result = refit(fleet, trainer, named_tensors(make_model(fleet.model, 3)))
    assert_generates(fleet, 3)
    assert (result.transport, result.staged) == (Transport.LAYOUT, True)
    assert result.reason == told_of(fleet, result)["reason"]
    assert result.reason == "Layout over Gloo: trainer and engines share no memory"


@pytest.fixture(scope="module")
def engines(fleet: HostFleet) -> HostFleet:
    """The module's engines without a sync job: the tests make its calls."""
    fleet.stop_sync()
    return fleet


@pytest.fixture
def epoch(engines: HostFleet) -> Iterator[Epoch]:
    joined = Epoch(engines.engines, after=seen(engines))
    yield joined
    joined.close()


def seen(engines: HostFleet) -> int:
    """The epoch that no engine's calls may be behind."""
    return max(engine.report().epoch for engine in engines.engines)


def assert_says(engines: HostFleet, seed: int, version: int, only: Launched | None = None) -> None:
    model = make_model(engines.model, seed)
    for prompt in PROMPTS:
        expected = greedy_tokens(model, engines.model, prompt, TOKENS)
        for engine in [only] if only else engines.engines:
            assert engine.generate(prompt, TOKENS) == (expected, version), (engine.name, prompt)


def calibrated(engines: HostFleet, epoch: Epoch, seed: int) -> int:
    """The version of a refit after which every rank knows what it may write in place."""
    version = engines.next_version()
    epoch.refit(named_tensors(make_model(engines.model, seed)), version)
    return version


def test_the_first_refit_goes_through_the_loader_and_the_next_ones_straight_into_the_live_weights(
    engines: HostFleet, epoch: Epoch
):
    placed = []
    for seed in (11, 12, 13):
        # No engine has seen this order, which makes a manifest of its own.
        tensors = dict(reversed(named_tensors(make_model(engines.model, seed)).items()))
        version = engines.next_version()
        placed.append([layout["placedBytes"] for layout in epoch.check(tensors)])
        reports = epoch.refit(tensors, version)
        assert_says(engines, seed, version)
        assert len({report["liveDigests"][0] for report in reports}) == 1
    whole = sum(tensor.nbytes for tensor in tensors.values())
    assert placed == [[0, 0], [whole, whole], [whole, whole]]
    assert [report["layouts"] for report in reports] == [[], []]


def test_a_staged_version_is_swapped_in_under_load_and_no_request_fails(engines: HostFleet, epoch: Epoch):
    before = calibrated(engines, epoch, 21)
    tensors = named_tensors(make_model(engines.model, 22))
    epoch.check(tensors)
    assert all(report["stagingBytes"] > 0 for report in epoch.prepare(tensors, staged=True))
    over, answers = threading.Event(), []

    def ask(engine: Launched) -> None:
        while not over.is_set():
            answers.append((engine.name, *engine.generate(PROMPTS[2], TOKENS)))

    clients = [threading.Thread(target=ask, args=(engine,)) for engine in engines.engines for _ in range(2)]
    for client in clients:
        client.start()
    after = engines.next_version()
    try:
        await_that("requests are answered", lambda: len(answers) >= 4)
        epoch.transfer(tensors, after, staged=True)
        for report in [engine.report() for engine in engines.engines]:
            assert (report.state, report.version, report.version_in_flight) == (WorkerState.SERVING, before, after)
            assert report.staged
        seen = len(answers)
        await_that("the old version still answers", lambda: len(answers) >= seen + 4)
        commits = epoch.all("commit", version=after, cache="Reset")
        assert [(commit["state"], commit["cacheReset"]) for commit in commits] == [("Serving", True)] * 2
        assert all(0 < commit["pauseSeconds"] < 2 for commit in commits)
        seen = len(answers)
        await_that("the new version answers", lambda: len(answers) >= seen + 8)
    finally:
        over.set()
        for client in clients:
            client.join(SECONDS)
    expected = {
        version: greedy_tokens(make_model(engines.model, seed), engines.model, PROMPTS[2], TOKENS)
        for version, seed in ((before, 21), (after, 22))
    }
    whole = [(tokens, version) for _, tokens, version in answers if tokens in expected.values()]
    # Only those in flight when the weights changed may hold tokens of both.
    assert len(answers) - len(whole) <= len(clients)
    assert {version for tokens, version in whole if tokens == expected[after]} == {after}
    assert_says(engines, 22, after)


def test_every_token_across_swaps_under_load_is_of_one_version_and_of_none_before_it(engines: HostFleet, epoch: Epoch):
    """Steps are in flight when a swap is asked for; none of them may see weights of two versions, and none later a block of older ones."""
    seeds = (23, 24, 25, 26)
    calibrated(engines, epoch, seeds[0])
    tensors = named_tensors(make_model(engines.model, seeds[0]))
    epoch.check(tensors)
    epoch.prepare(tensors, staged=True)
    over, answers = threading.Event(), []

    def ask(engine: Launched) -> None:
        while not over.is_set():
            answers.append(engine.generate(PROMPTS[1], 200)[0])

    clients = [threading.Thread(target=ask, args=(engine,)) for engine in engines.engines for _ in range(3)]
    for client in clients:
        client.start()
    try:
        for seed in seeds[1:]:
            seen = len(answers)
            await_that("requests are answered", lambda seen=seen: len(answers) > seen)
            version = engines.next_version()
            epoch.transfer(named_tensors(make_model(engines.model, seed)), version, staged=True)
            commits = epoch.all("commit", version=version, cache="Reset")
            assert [(commit["state"], commit["cacheReset"]) for commit in commits] == [("Serving", True)] * 2
    finally:
        over.set()
        for client in clients:
            client.join(SECONDS)
    models = [make_model(engines.model, seed) for seed in seeds]
    across = 0
    for answer in answers:
        told = [greedy_choices(model, engines.model, PROMPTS[1], answer) for model in models]
        at = 0
        for place, token in enumerate(answer):
            while at < len(seeds) and told[at][place] != token:
                at += 1
            assert at < len(seeds), (answer, place)
        across += all(choices != answer for choices in told)
    assert across


@pytest.mark.scenario("F36")
def test_pausing_and_resuming_twice_changes_nothing_and_blocks_nobody(engines: HostFleet, epoch: Epoch):
    version = calibrated(engines, epoch, 25)
    for verb, body, state in (
        ("pause", {"mode": "Keep", "deadlineSeconds": SECONDS}, "Paused"),
        ("pause", {"mode": "Wait", "deadlineSeconds": SECONDS}, "Paused"),
        ("resume", {}, "Serving"),
        ("resume", {}, "Serving"),
    ):
        assert [report["state"] for report in epoch.all(verb, **body)] == [state] * 2
    assert_says(engines, 25, version)


def test_staged_refits_in_a_row_use_one_buffer(engines: HostFleet, epoch: Epoch):
    calibrated(engines, epoch, 31)
    tensors = named_tensors(make_model(engines.model, 32))
    epoch.check(tensors)
    epoch.prepare(tensors, staged=True)
    for seed in (32, 33, 34):
        version = engines.next_version()
        epoch.transfer(named_tensors(make_model(engines.model, seed)), version, staged=True)
        epoch.all("commit", version=version, cache="Reset")
        assert_says(engines, seed, version)


def test_an_aborted_staged_version_is_forgotten_and_the_old_one_serves_on(engines: HostFleet, epoch: Epoch):
    version = calibrated(engines, epoch, 41)
    tensors = named_tensors(make_model(engines.model, 42))
    epoch.check(tensors)
    epoch.prepare(tensors, staged=True)
    epoch.transfer(tensors, engines.next_version(), staged=True)
    epoch.all("abort", reason="the trainer thinks better of it")
    for engine in engines.engines:
        with pytest.raises(Refused, match="StaleVersion"):
            call(engine, "commit", epoch=epoch.number, version=engines.version, cache="Reset")
    assert_says(engines, 41, version)


def test_a_late_engine_borrows_what_a_serving_one_holds(engines: HostFleet, epoch: Epoch):
    lender, borrower = engines.engines
    calibrated(engines, epoch, 51)
    ahead = Epoch([lender], after=seen(engines))
    version = engines.next_version()
    ahead.refit(named_tensors(make_model(engines.model, 52)), version)
    ahead.close()
    call(borrower, "admit", epoch=ahead.number, version=version)
    assert borrower.probe("ready").startswith("Stale: ")
    lent = call(lender, "lend", epoch=ahead.number, version=version, wire=Wire.GLOO, deadlineSeconds=SECONDS)
    assert_says(engines, 52, version, only=lender)
    borrowed = call(
        borrower,
        "borrow",
        epoch=ahead.number,
        version=version,
        wire=Wire.GLOO,
        rendezvous=lent["rendezvous"],
        shape=lent["shape"],
        deadlineSeconds=SECONDS,
        holdSeconds=SECONDS,
    )
    assert borrowed["liveDigests"] == lent["liveDigests"]
    call(borrower, "commit", epoch=ahead.number, version=version, cache="Reset")
    call(borrower, "resume", epoch=ahead.number)
    assert_says(engines, 52, version)


@pytest.mark.row("A39")
@pytest.mark.row("B21")
@pytest.mark.row("B22")
@pytest.mark.scenario("F58")
def test_engines_copy_out_of_memory_that_the_trainer_shows_and_that_changes_after_the_refit(engines: HostFleet):
    epoch = Epoch(engines.engines, Wire.MEMORY, Transport.COLOCATED, after=seen(engines))
    kept = named_tensors(make_model(engines.model, 60))
    for seed in (61, 62, 63):
        for name, tensor in named_tensors(make_model(engines.model, seed)).items():
            kept[name].copy_(tensor)
        version = engines.next_version()
        epoch.refit(kept, version)
        # Whatever the trainer does to its tensors after the last answer must not reach an engine.
        for tensor in kept.values():
            tensor.zero_()
        assert_says(engines, seed, version)
    assert sum(layout["detouredBytes"] for layout in epoch.layouts) == 0
    epoch.prepare(kept, staged=True)
    version = engines.next_version()
    epoch.transfer(named_tensors(make_model(engines.model, 64)), version, staged=True)
    assert_says(engines, 63, version - 1)
    epoch.all("commit", version=version, cache="Reset")
    assert_says(engines, 64, version)
    epoch.close()


@pytest.mark.scenario("F56")
def test_fifty_refits_leave_memory_as_it_was(engines: HostFleet, epoch: Epoch):
    calibrated(engines, epoch, 71)
    tensors = named_tensors(make_model(engines.model, 72))
    epoch.check(tensors)
    epoch.prepare(tensors, staged=True)
    sizes = []
    for round_ in range(50):
        version = engines.next_version()
        epoch.transfer(tensors, version, staged=True)
        epoch.all("commit", version=version, cache="Reset")
        if round_ >= 9:
            sizes.append(resident_bytes(engines))
    assert max(sizes) - sizes[0] < 16 << 20
    assert_says(engines, 72, version)


def resident_bytes(engines: HostFleet) -> int:
    """Memory of the processes that hold weights."""
    return sum(
        int(line.split()[1]) * 1024
        for engine in engines.engines
        for pid, title in engine.vllm_processes().items()
        if title.startswith("VLLM::")
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )


def test_a_cpu_engine_says_that_it_cannot_sleep_and_serves_on(engines: HostFleet):
    engine = engines.engines[0]
    with pytest.raises(Refused, match="started without --enable-sleep-mode, which vLLM offers on GPUs alone"):
        call(engine, "sleep", epoch=engine.report().epoch, level=1, deadlineSeconds=SECONDS)
    assert engine.report().state is WorkerState.SERVING
