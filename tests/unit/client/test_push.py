"""Transfers by layout between ranks in threads, over real gloo: what arrives is what torch itself would have cut."""

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

from fakes.ranks import Ranks, deadline  # noqa: E402
from fakes.sharded_model import DETOURED, layout, live, manifest, weights  # noqa: E402
from rolloutfleet.layout.blocks import Block  # noqa: E402
from rolloutfleet.layout.layout import checkpoint_layout  # noqa: E402
from rolloutfleet.layout.program import Part  # noqa: E402
from rolloutfleet.sources import NamedTensors, Shard, ShardedTensors  # noqa: E402
from rolloutfleet.sources.source import WeightSource  # noqa: E402
from rolloutfleet.tiles.digesting import SumTable  # noqa: E402
from rolloutfleet.transport import courses, pulling, pushing, routes  # noqa: E402
from rolloutfleet.transport.pulling import Puller  # noqa: E402
from rolloutfleet.transport.pushing import Pusher  # noqa: E402
from rolloutfleet.transport.routes import Route  # noqa: E402
from rolloutfleet.transport.tables import DigestMismatch  # noqa: E402

MANIFEST = manifest()


@pytest.fixture(autouse=True)
def _small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that cut a few hundred kilobytes as the real ones cut gigabytes."""
    monkeypatch.setattr(courses, "MESSAGE_BYTES", 4096)
    monkeypatch.setattr(routes, "MESSAGE_BYTES", 4096)
    monkeypatch.setattr(routes, "STEP_BYTES", 16384)
    monkeypatch.setattr(routes, "CHAIN_STEP_BYTES", 8192)


def whole(tensors: Mapping[str, torch.Tensor], rank: int, ranks: int) -> WeightSource:
    """Every trainer rank holds everything."""
    return NamedTensors(dict(tensors))


def sharded(tensors: Mapping[str, torch.Tensor], rank: int, ranks: int) -> WeightSource:
    """Matrices cut unevenly over the ranks, by rows or by columns; what has one dimension or none lies on the last rank."""
    held: dict[str, Any] = {}
    for name, tensor in tensors.items():
        dim = 1 if name in {"down", "experts.0.w2", "k"} else 0
        if tensor.dim() < 2:
            if rank == ranks - 1:
                held[name] = tensor
            continue
        parts = tensor.chunk(ranks, dim)
        start = sum(part.shape[dim] for part in parts[:rank])
        held[name] = Shard(parts[rank].clone(), dim, start=start, whole=tensor.shape[dim])
    return ShardedTensors(held)


class Transfers:
    """Pushers and pullers of one group: trainer ranks first, then a worker rank for each shard."""

    def __init__(
        self,
        ranks: Ranks,
        shards: Sequence[tuple[int, int]],
        make_source: Callable[[Mapping[str, torch.Tensor], int, int], WeightSource] = whole,
        route: Route | None = None,
        layout_of: Callable[[int, int], Any] = layout,
    ) -> None:
        self.ranks = ranks
        self.trainers = len(ranks.groups) - len(shards)
        self.shards = dict(enumerate(shards, self.trainers))
        self.layouts = {rank: layout_of(*shard) for rank, shard in self.shards.items()}
        self.make_source = make_source
        self.destinations = {rank: self.blank(rank) for rank in self.shards}
        self.taken: dict[int, dict[str, torch.Tensor]] = {rank: {} for rank in self.shards}
        first = self.sources(0)
        held = [first[rank].holdings(rank, self.trainers) for rank in range(self.trainers)]
        digests = [self.layouts[rank].digest for rank in sorted(self.layouts)]
        self.pushers: dict[int, Pusher] = {}
        self.pullers: dict[int, Puller] = {}

        def make(rank: int) -> None:
            group = ranks.groups[rank]
            if rank < self.trainers:
                self.pushers[rank] = Pusher(group, MANIFEST, self.layouts, held, route, deadline=deadline())
            else:
                self.pullers[rank] = Puller(
                    group,
                    MANIFEST,
                    self.layouts[rank],
                    held,
                    digests,
                    self.destinations[rank],
                    route,
                    deadline=deadline(),
                )

        ranks.run({rank: lambda rank=rank: make(rank) for rank in ranks.groups})

    def blank(self, rank: int) -> dict[str, torch.Tensor]:
        return {
            parameter.name: torch.zeros(parameter.elements, dtype=getattr(torch, parameter.dtype))
            for parameter in self.layouts[rank].live
        }

    def sources(self, seed: int) -> list[WeightSource]:
        sources = [self.make_source(weights(seed), rank, self.trainers) for rank in range(self.trainers)]
        for source in sources:
            source.manifest()
            source.bind(MANIFEST)
        return sources

    def steps(self, sources: Sequence[WeightSource], seconds: float = 30) -> dict[int, Callable[[], Any]]:
        until = deadline(seconds)
        steps: dict[int, Callable[[], Any]] = {
            rank: lambda rank=rank: self.pushers[rank].push(sources[rank], until) for rank in self.pushers
        }
        for rank, pusher in self.pushers.items():
            pusher.aim(sources[rank])
        for rank in self.pullers:
            steps[rank] = lambda rank=rank: self.pullers[rank].pull(until, self.taken[rank].update)
        return steps

    def refit(self, seed: int) -> dict[int, Any]:
        return self.ranks.run(self.steps(self.sources(seed)))

    def assert_holds(self, seed: int) -> None:
        tensors = weights(seed)
        for rank, shard in self.shards.items():
            for name, wanted in live(tensors, *shard).items():
                assert torch.equal(self.destinations[rank][name].view(wanted.shape), wanted), (rank, name)
            assert set(self.taken[rank]) == set(DETOURED)
            for name in DETOURED:
                assert torch.equal(self.taken[rank][name], tensors[name]), (rank, name)


@pytest.fixture
def world() -> Iterator[Callable[[int], Ranks]]:
    with contextlib.ExitStack() as stack:

        def make(world_size: int) -> Ranks:
            ranks = Ranks(world_size)
            stack.callback(ranks.close)
            return ranks

        yield make


@pytest.mark.parametrize("make_source", [whole, sharded])
@pytest.mark.parametrize("trainers", [1, 2, 3])
@pytest.mark.parametrize("shards", [[(0, 1)], [(0, 2), (1, 2)]], ids=["TP1", "TP2"])
def test_every_rank_holds_its_slices_after_each_of_two_refits(world, trainers, shards, make_source) -> None:
    transfers = Transfers(world(trainers + len(shards)), shards, make_source)
    for seed in (1, 2):
        results = transfers.refit(seed)
        transfers.assert_holds(seed)
        sent = results[0].digests
        for rank in transfers.pullers:
            assert results[rank].digest == sent[transfers.layouts[rank].digest]
            assert results[rank].tensors == len(MANIFEST.tensors)
        assert results[0].nbytes == sum(results[rank].nbytes for rank in transfers.pullers)
        assert all(not results[rank].digests for rank in range(1, trainers))


@pytest.mark.parametrize(
    ("trainers", "route"), [(1, Route.EACH), (1, Route.CHAIN), (1, Route.BROADCAST), (2, Route.EACH), (2, Route.CHAIN)]
)
def test_each_route_brings_an_audience_of_three_the_same(world, trainers: int, route: Route) -> None:
    transfers = Transfers(world(trainers + 3), [(0, 1)] * 3, sharded, route)
    for seed in (1, 2):
        results = transfers.refit(seed)
        transfers.assert_holds(seed)
        assert len({results[rank].digest for rank in transfers.pullers} | set(results[0].digests.values())) == 1


def test_engines_of_two_ranks_each_form_an_audience_for_each_shard(world) -> None:
    transfers = Transfers(world(6), [(0, 2), (1, 2)] * 2, sharded)
    results = transfers.refit(1)
    transfers.assert_holds(1)
    assert results[2].digest == results[4].digest != results[3].digest == results[5].digest


def test_a_layout_not_yet_compared_brings_every_tensor_whole_under_its_name(world) -> None:
    transfers = Transfers(world(4), [(0, 1)] * 2, sharded, layout_of=lambda *_: checkpoint_layout(MANIFEST))
    transfers.refit(1)
    for rank in transfers.pullers:
        assert transfers.taken[rank].keys() == weights(1).keys()
        for name, tensor in weights(1).items():
            assert torch.equal(transfers.taken[rank][name], tensor)


def test_a_rank_receives_no_more_than_its_share(world) -> None:
    transfers = Transfers(world(3), [(0, 2), (1, 2)])
    results = transfers.refit(1)
    for rank in transfers.pullers:
        needed = transfers.layouts[rank].placed_bytes + transfers.layouts[rank].detoured_bytes
        assert needed <= results[rank].nbytes < 1.02 * needed


@pytest.mark.row("A-U7")
def test_a_transfer_of_many_steps_takes_turns_in_buffers_of_bounded_size(world) -> None:
    transfers = Transfers(world(2), [(0, 1)])
    results = transfers.refit(1)
    pusher, puller = transfers.pushers[0], transfers.pullers[1]
    assert 0 < pusher.buffer_bytes <= pushing.RING * routes.STEP_BYTES
    assert 0 < puller.buffer_bytes <= pulling.RING * routes.STEP_BYTES
    assert results[0].nbytes > 2 * max(pushing.RING, pulling.RING) * routes.STEP_BYTES
    transfers.assert_holds(1)


def test_tensors_that_lie_transposed_are_sent_right(world) -> None:
    def transposed(tensors: Mapping[str, torch.Tensor], rank: int, ranks: int) -> WeightSource:
        return NamedTensors({name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in tensors.items()})

    transfers = Transfers(world(2), [(0, 1)], transposed)
    for seed in (1, 2):
        transfers.refit(seed)
        transfers.assert_holds(seed)


def test_tensors_updated_in_place_are_sent_as_they_are_now(world) -> None:
    transfers = Transfers(world(2), [(0, 1)])
    tensors = weights(1)
    source = NamedTensors(tensors)
    source.bind(MANIFEST)
    transfers.ranks.run(transfers.steps([source]))
    for name, tensor in weights(2).items():
        tensors[name].copy_(tensor)
    transfers.ranks.run(transfers.steps([source]))
    transfers.assert_holds(2)


def test_a_puller_aimed_at_a_second_buffer_leaves_the_first_alone(world) -> None:
    transfers = Transfers(world(2), [(0, 1)])
    transfers.refit(1)
    before = {name: tensor.clone() for name, tensor in transfers.destinations[1].items()}
    staging = transfers.blank(1)
    transfers.pullers[1].aim(staging)
    transfers.refit(2)
    assert all(torch.equal(transfers.destinations[1][name], tensor) for name, tensor in before.items())
    transfers.destinations[1] = staging
    transfers.assert_holds(2)


class FlippingGroup:
    """A group whose wire damages one bit of the third message after the opening word."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, tensor: torch.Tensor, to: int, until: float) -> None:
        self._count += 1
        if self._count == 4:
            tensor = tensor.clone()
            tensor[-1] ^= 1
        self._group.send(tensor, to, until)


@pytest.mark.scenario("F54")
def test_a_damaged_bit_is_reported_by_the_tensor_it_is_in_and_the_next_refit_works(world) -> None:
    transfers = Transfers(world(2), [(0, 1)], route=Route.EACH)
    pusher = transfers.pushers[0]
    pusher._group = FlippingGroup(pusher._group)
    message = pusher._courses[0].program.messages[2]
    outcomes = transfers.ranks.outcomes(transfers.steps(transfers.sources(1)))
    assert isinstance(outcomes[1], DigestMismatch)
    assert outcomes[1].tensors == (MANIFEST.tensors[message.parts[-1].source].name,)
    assert outcomes[1].tensors[0] in str(outcomes[1])
    transfers.refit(2)
    transfers.assert_holds(2)


def test_nothing_is_pushed_before_something_is_aimed_at(world) -> None:
    transfers = Transfers(world(2), [(0, 1)])
    with pytest.raises(ValueError, match="nothing is aimed at"):
        transfers.pushers[0].push(transfers.sources(1)[0], deadline())
    transfers.refit(1)
    transfers.assert_holds(1)


class Counted(NamedTensors):
    """Counts how often somebody asks where its tensors lie, or reads them."""

    asked = 0

    def spans(self, *arguments: Any) -> Any:
        self.asked += 1
        return super().spans(*arguments)

    def read(self, *arguments: Any) -> Any:
        self.asked += 1
        return super().read(*arguments)

    def bind(self, manifest: Any) -> None:
        self.asked += 1
        super().bind(manifest)


def test_a_push_of_tensors_that_stay_and_are_cast_asks_nothing_of_the_source(world) -> None:
    transfers = Transfers(world(2), [(0, 1)])
    # A layout takes bfloat16 where the trainer keeps float32 masters.
    masters = {
        name: tensor.float() if tensor.dtype is torch.bfloat16 else tensor for name, tensor in weights(1).items()
    }
    source = Counted(masters)
    pusher = transfers.pushers[0]
    source.bind(source.manifest())
    pusher.aim(source)
    source.asked = 0
    until = deadline()
    for seed in (2, 3):
        for name, tensor in weights(seed).items():
            masters[name].copy_(tensor)
        pusher.aim(source)
        transfers.ranks.run({0: lambda: pusher.push(source, until), 1: transfers.steps([source])[1]})
        transfers.assert_holds(seed)
    assert source.asked == 0


def test_tensors_that_nobody_wants_any_more_are_not_kept_by_who_has_pushed_them(world) -> None:
    transfers = Transfers(world(2), [(0, 1)])
    tensors = weights(1)
    masters = {name: t.clone().float() if "norm" in name else t.clone() for name, t in tensors.items()}
    gone = [weakref.ref(tensor.untyped_storage()) for tensor in masters.values()]
    source = NamedTensors(masters)
    source.bind(source.manifest())
    pusher = transfers.pushers[0]
    steps = transfers.steps([source])
    transfers.ranks.run(steps)
    transfers.assert_holds(1)
    with pytest.raises(ValueError, match="lies elsewhere"):
        pusher.push(transfers.sources(1)[0], deadline())
    del source, steps
    masters.clear()
    gc.collect()
    assert [ref for ref in gone if ref() is not None] == []


def test_columns_of_a_fused_matrix_that_no_digest_word_divides_are_sent(world) -> None:
    def fused(tensors: Mapping[str, torch.Tensor], rank: int, ranks: int) -> WeightSource:
        """Every matrix is what is left of a wider one, whose rows begin elsewhere than words of the whole."""
        wider = {
            name: torch.nn.functional.pad(t, (0, 5))[:, : t.shape[1]] for name, t in tensors.items() if t.dim() == 2
        }
        return NamedTensors(dict(tensors) | wider)

    transfers = Transfers(world(2), [(0, 1)], fused)
    for seed in (1, 2):
        transfers.refit(seed)
        transfers.assert_holds(seed)


def test_an_odd_row_is_summed_where_it_was_packed() -> None:
    given = torch.arange(16, dtype=torch.bfloat16).view(2, 8)
    source = NamedTensors({"w": given[:, :3]})
    source.bind(source.manifest())
    part = Part(0, Block.contiguous(0, 6), 0, Block.contiguous(0, 6), 0)
    (span,) = source.spans(0, part.source_block)
    assert (span.block.rows, span.block.run) == (2, 3)
    slab = torch.zeros(64, dtype=torch.uint8)
    slab[:12] = given[:, :3].contiguous().view(-1).view(torch.uint8)
    entry = pushing._sum_entry(part, 0, torch.bfloat16, 4, (span,))(slab)
    packed = given[:, :3].contiguous().view(-1)
    wanted = SumTable.build([(packed, part.block, 0, part.block, 4)], sources=1).run()
    assert torch.equal(SumTable.build([entry], sources=1).run(), wanted)


def test_tensors_that_lie_elsewhere_are_noticed_and_sent_from_there(world) -> None:
    transfers = Transfers(world(2), [(0, 1)])
    tensors = weights(1)
    source = NamedTensors(tensors)
    for seed in (1, 2):
        tensors.update(weights(seed))
        source.bind(MANIFEST)
        transfers.ranks.run(transfers.steps([source]))
        transfers.assert_holds(seed)


def test_a_transfer_that_fails_before_the_trainers_first_word_has_landed_nothing(world) -> None:
    transfers = Transfers(world(2), [(0, 1)])
    puller = transfers.pullers[1]
    before = {name: tensor.clone() for name, tensor in transfers.destinations[1].items()}
    steps = transfers.steps(transfers.sources(1))
    steps[0] = lambda: transfers.ranks.groups[0].abort("the trainer cannot send")
    outcomes = transfers.ranks.outcomes(steps)
    assert isinstance(outcomes[1], OSError)
    assert not puller.landed
    assert all(torch.equal(transfers.destinations[1][name], tensor) for name, tensor in before.items())


def test_a_transfer_that_ends_has_landed(world) -> None:
    transfers = Transfers(world(2), [(0, 1)])
    transfers.refit(1)
    assert transfers.pullers[1].landed


def test_members_that_derive_different_programs_find_out_before_a_transfer(world) -> None:
    ranks = world(3)
    model = layout(0, 1)
    sources = [sharded(weights(1), rank, 2) for rank in range(2)]
    for source in sources:
        source.bind(MANIFEST)
    held = [source.holdings(rank, 2) for rank, source in enumerate(sources)]
    everything = NamedTensors(weights(1))
    everything.bind(MANIFEST)
    other = [held[0], everything.holdings(1, 2)]
    outcomes = ranks.outcomes(
        {
            0: lambda: Pusher(ranks.groups[0], MANIFEST, {2: model}, held, deadline=deadline()),
            1: lambda: Pusher(ranks.groups[1], MANIFEST, {2: model}, held, deadline=deadline()),
            2: lambda: Puller(
                ranks.groups[2],
                MANIFEST,
                model,
                other,
                [model.digest],
                {p.name: torch.zeros(p.elements, dtype=getattr(torch, p.dtype)) for p in model.live},
                deadline=deadline(),
            ),
        }
    )
    assert "rank 0 derives another program than rank 2" in str(outcomes[2])


def test_a_destination_that_does_not_fit_is_named(world) -> None:
    transfers = Transfers(world(2), [(0, 1)])
    wrong = transfers.destinations[1] | {"qkv": torch.zeros(5, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match=r"destination of qkv is bfloat16 \[5\] on cpu; .* bfloat16 \[8192\] on cpu"):
        transfers.pullers[1].aim(wrong)
    with pytest.raises(ValueError, match="no destination for parameter w2"):
        transfers.pullers[1].aim({name: t for name, t in transfers.destinations[1].items() if name != "w2"})


def test_a_collective_is_refused_where_two_ranks_send(world) -> None:
    ranks = world(3)
    source = NamedTensors(weights(1))
    source.bind(MANIFEST)
    held = [source.holdings(rank, 2) for rank in range(2)]
    with pytest.raises(ValueError, match="route Broadcast reaches every rank from one sender, but there are 2"):
        Pusher(ranks.groups[0], MANIFEST, {2: layout(0, 1)}, held, Route.BROADCAST, deadline=deadline())


def test_an_error_of_the_loader_frees_the_trainer_and_every_other_worker(world) -> None:
    transfers = Transfers(world(3), [(0, 1)] * 2)

    def refuse(_: Any) -> None:
        raise KeyError("no such module")

    steps = transfers.steps(transfers.sources(1))
    steps[1] = lambda: transfers.pullers[1].pull(deadline(), refuse)
    began = time.monotonic()
    outcomes = transfers.ranks.outcomes(steps)
    assert time.monotonic() - began < 5
    assert isinstance(outcomes[1], KeyError)
    assert all(isinstance(outcomes[rank], OSError) for rank in (0, 2))


@pytest.mark.parametrize("route", [Route.EACH, Route.CHAIN])
def test_an_abort_frees_whoever_waits(world, route: Route) -> None:
    transfers = Transfers(world(3), [(0, 1)] * 2, route=route)
    steps = transfers.steps(transfers.sources(1))
    steps[2] = lambda: transfers.ranks.groups[0].abort("the sync job said so")
    began = time.monotonic()
    outcomes = transfers.ranks.outcomes(steps)
    assert time.monotonic() - began < 5
    assert all(isinstance(outcomes[rank], OSError) for rank in (0, 1))


def test_a_trainer_that_never_sends_is_waited_for_until_the_deadline(world) -> None:
    transfers = Transfers(world(2), [(0, 1)])
    steps = transfers.steps(transfers.sources(1), seconds=0.5)
    began = time.monotonic()
    outcome = transfers.ranks.outcomes({1: steps[1]})[1]
    assert isinstance(outcome, TimeoutError)
    assert time.monotonic() - began < 5
