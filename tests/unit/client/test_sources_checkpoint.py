"""A checkpoint's tensors on their way: from files that are mapped, and from remote ones that are read in bounded amounts."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not part of the development environment; the worker image has it")

import fsspec  # noqa: E402

from fakes.checkpoints import write_torch  # noqa: E402
from fakes.ranks import Ranks, deadline  # noqa: E402
from fakes.sharded_model import DETOURED, layout, live, manifest, weights  # noqa: E402
from rolloutfleet.layout.blocks import Block  # noqa: E402
from rolloutfleet.session import place_of  # noqa: E402
from rolloutfleet.sources import WeightSource, open_checkpoint  # noqa: E402
from rolloutfleet.sources.checkpoint import Checkpoint  # noqa: E402
from rolloutfleet.sources.storage import open_files  # noqa: E402
from rolloutfleet.transport import courses, routes  # noqa: E402
from rolloutfleet.transport.bridging import HostBridge  # noqa: E402
from rolloutfleet.transport.pulling import Puller  # noqa: E402
from rolloutfleet.transport.pushing import Pusher  # noqa: E402
from rolloutfleet.transport.routes import Route  # noqa: E402

MANIFEST = manifest()
SHARDS = [(0, 2), (1, 2)]


@pytest.fixture(params=["mapped", "remote"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Checkpoint]:
    """Opens the checkpoint of a seed's weights."""

    def open_seed(seed: int) -> Checkpoint:
        path = write_torch(tmp_path / str(seed) / "model.safetensors", weights(seed))
        if request.param == "mapped":
            return open_checkpoint(str(path.parent))
        fsspec.filesystem("memory").pipe(f"/{seed}/model.safetensors", path.read_bytes())
        return open_checkpoint(f"memory://{seed}")

    return open_seed


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with contextlib.closing(Ranks(1 + len(SHARDS))) as made:
        yield made


def test_tensors_are_those_that_were_saved(opened) -> None:
    source = opened(3)
    assert isinstance(source, WeightSource)
    assert source.manifest() == MANIFEST
    source.bind(MANIFEST)
    for spec, tensor in source.whole():
        assert torch.equal(tensor, weights(3)[spec.name]), spec
    holdings = source.holdings(0, 1)
    holdings.check(MANIFEST)
    for piece in holdings.pieces:
        wanted = weights(3)[MANIFEST.tensors[piece.source].name].view(-1)
        assert torch.equal(source.read(piece.source, piece.block), wanted)
        assert source.read(piece.source, piece.block, torch.float64).dtype is torch.float64
    index = next(i for i, spec in enumerate(MANIFEST.tensors) if spec.name == "q")
    block = Block(offset=3, run=4, rows=5, stride=64)
    assert torch.equal(source.read(index, block), weights(3)["q"].view(-1)[3:].as_strided((5, 4), (64, 1)).reshape(-1))


@pytest.mark.parametrize("bridged", [False, True], ids=["direct", "bridged"])
@pytest.mark.parametrize("route", [Route.EACH, Route.CHAIN])
def test_a_checkpoint_arrives_at_every_rank_as_its_slices(
    opened, ranks: Ranks, route: Route, bridged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also through a bridge, which here bridges nothing but takes every step that it takes before a GPU."""
    monkeypatch.setattr(courses, "MESSAGE_BYTES", 4096)
    monkeypatch.setattr(routes, "STEP_BYTES", 16384)
    layouts = {rank: layout(*shard) for rank, shard in enumerate(SHARDS, 1)}
    digests = [layouts[rank].digest for rank in sorted(layouts)]
    places = {
        rank: {p.name: torch.zeros(p.elements, dtype=getattr(torch, p.dtype)) for p in layouts[rank].live}
        for rank in layouts
    }
    source = opened(1)
    source.bind(source.manifest())
    held = [source.holdings(0, 1)]
    ends: dict[int, Pusher | Puller] = {}

    def make(rank: int) -> None:
        group = HostBridge(ranks.groups[rank], torch.device("cpu")) if bridged and rank else ranks.groups[rank]
        if rank == 0:
            ends[0] = Pusher(group, MANIFEST, layouts, held, route, deadline=deadline())
        else:
            ends[rank] = Puller(group, MANIFEST, layouts[rank], held, digests, places[rank], route, deadline=deadline())

    ranks.run({rank: lambda rank=rank: make(rank) for rank in ranks.groups})
    for seed in (1, 2):
        source = opened(seed)
        source.bind(source.manifest())
        taken: dict[int, dict[str, torch.Tensor]] = {rank: {} for rank in layouts}
        ends[0].aim(source)
        work = {
            rank: lambda rank=rank, taken=taken: ends[rank].pull(deadline(), taken[rank].update) for rank in layouts
        }
        results = ranks.run(work | {0: lambda source=source: ends[0].push(source, deadline())})
        for rank, shard in enumerate(SHARDS, 1):
            for name, wanted in live(weights(seed), *shard).items():
                assert torch.equal(places[rank][name].view(wanted.shape), wanted), name
            assert taken[rank].keys() == set(DETOURED)
            assert results[rank].digest == results[0].digests[layouts[rank].digest]


def test_a_bridge_moves_what_lies_on_a_device_both_ways(ranks: Ranks) -> None:
    bridges = {rank: HostBridge(group, torch.device("cpu")) for rank, group in ranks.groups.items()}
    assert [(bridge.rank, bridge.world_size, bridge.epoch) for bridge in bridges.values()] == [
        (rank, 3, 1) for rank in range(3)
    ]
    got = {rank: torch.zeros(4) for rank in (1, 2)}

    def lead() -> None:
        bridges[0].broadcast(torch.arange(4.0), 0, deadline())
        with bridges[0].grouped(deadline()):
            bridges[0].send(torch.full((4,), 7.0), 1, deadline())
            bridges[0].send(torch.full((4,), 8.0), 2, deadline())

    def follow(rank: int) -> torch.Tensor:
        first = torch.zeros(4)
        bridges[rank].broadcast(first, 0, deadline())
        with bridges[rank].grouped(deadline()):
            bridges[rank].receive(got[rank], 0, deadline())
        bridges[rank].synchronize(deadline())
        return first

    results = ranks.run({0: lead, 1: lambda: follow(1), 2: lambda: follow(2)})
    assert torch.equal(results[1], torch.arange(4.0))
    assert torch.equal(got[1], torch.full((4,), 7.0))
    assert torch.equal(got[2], torch.full((4,), 8.0))
    bridges[1].abort("enough")
    with pytest.raises(ConnectionAbortedError, match="enough"):
        bridges[1].raise_if_ended()


def test_of_a_remote_checkpoint_no_more_is_kept_than_allowed(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "model.safetensors", weights(1))
    fsspec.filesystem("memory").pipe("/kept/model.safetensors", path.read_bytes())
    source = Checkpoint(open_files("memory://kept"), kept_bytes=20_000)
    source.bind(source.manifest())
    for spec, _ in source.whole():
        held = [tensor.nbytes for tensor in source._store._kept.values()]
        assert sum(held) <= max(20_000, spec.nbytes)


def test_a_checkpoint_is_in_no_memory_that_could_be_shared(tmp_path: Path) -> None:
    source = open_checkpoint(str(write_torch(tmp_path / "model.safetensors", weights(1))))
    assert source.gpu() is None
    assert place_of(source.gpu(), source.shareable()).locality.memory == ""
    assert place_of(None).locality.memory != ""


def test_a_checkpoint_is_sent_by_one_rank_and_whole(tmp_path: Path) -> None:
    source = open_checkpoint(str(write_torch(tmp_path / "model.safetensors", weights(1))))
    with pytest.raises(ValueError, match="this team has 2"):
        source.holdings(0, 2)
    other = MANIFEST.model_copy(update={"tensors": MANIFEST.tensors[1:]})
    with pytest.raises(ValueError, match="its manifest is not the one that was asked for"):
        source.bind(other)
