"""Push weights by layout between processes with nothing but torch: right bytes, seconds beside a raw broadcast, and what a kill does.

With one GPU trainer and worker share it: two values of NCCL_HOSTID let NCCL take them for two hosts, and bytes cross its network
transport over loopback, which proves the path and not its speed. With several GPUs the trainer has the first and every other one is a
worker. Prints a line of JSON for each measurement, leaves with 1 when something is wrong. By hand::

    PYTHONPATH=client python3 tests/gpu/push_pull.py             # TINY=1 for gloo on a machine without GPU
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from rolloutfleet.contract.manifest import Manifest, TensorSpec
from rolloutfleet.contract.policy import Wire
from rolloutfleet.layout.blocks import Block
from rolloutfleet.layout.holdings import whole_holdings
from rolloutfleet.layout.layout import Layout, Parameter, Placement, build_layout
from rolloutfleet.routing import hold_listening_socket
from rolloutfleet.sources import NamedTensors
from rolloutfleet.transport.group import Group, form_group
from rolloutfleet.transport.pulling import Puller
from rolloutfleet.transport.pushing import Pusher
from rolloutfleet.transport.routes import Route
from rolloutfleet.transport.store import SessionStore, connect_store, host_store

TINY = os.environ.get("TINY") == "1"
ROUNDS = 3 if TINY else 12
CHUNK = 1 << 30
FREED_SECONDS = 5.0

Fused = dict[str, list[tuple[str, tuple[int, ...]]]]
"""Parameters by name, each of the source tensors that it is concatenated from."""


def dense() -> Fused:
    """Qwen2-7B's shape: 15.2 GB in 339 source tensors."""
    hidden, keys, ffn, vocabulary, layers = (64, 16, 96, 320, 2) if TINY else (3584, 512, 18944, 152064, 28)
    model: Fused = {"embed": [("embed", (vocabulary, hidden))], "head": [("head", (vocabulary, hidden))]}
    for n in range(layers):
        qkv = {"q": hidden, "k": keys, "v": keys}
        model |= {
            f"{n}.qkv": [(f"{n}.{name}", (size, hidden)) for name, size in qkv.items()],
            f"{n}.qkv_bias": [(f"{n}.{name}_bias", (size,)) for name, size in qkv.items()],
            f"{n}.o": [(f"{n}.o", (hidden, hidden))],
            f"{n}.gate_up": [(f"{n}.{name}", (ffn, hidden)) for name in ("gate", "up")],
            f"{n}.down": [(f"{n}.down", (hidden, ffn))],
            f"{n}.norm1": [(f"{n}.norm1", (hidden,))],
            f"{n}.norm2": [(f"{n}.norm2", (hidden,))],
        }
    return model | {"norm": [("norm", (hidden,))]}


def experts(layers: int) -> Fused:
    """Qwen3-30B-A3B's shape: 61 GB in 18,867 source tensors with all 48 layers."""
    hidden, ffn, count, vocabulary = (64, 32, 4, 320) if TINY else (2048, 768, 128, 151936)
    model: Fused = {"embed": [("embed", (vocabulary, hidden))], "head": [("head", (vocabulary, hidden))]}
    for n in range(layers):
        qkv = {"q": 2 * hidden, "k": hidden // 4, "v": hidden // 4}
        pairs = [(f"{n}.{e}.{name}", (ffn, hidden)) for e in range(count) for name in ("gate", "up")]
        model |= {
            f"{n}.qkv": [(f"{n}.{name}", (size, hidden)) for name, size in qkv.items()],
            f"{n}.o": [(f"{n}.o", (hidden, 2 * hidden))],
            f"{n}.router": [(f"{n}.router", (count, hidden))],
            f"{n}.w13": pairs,
            f"{n}.w2": [(f"{n}.{e}.down", (hidden, ffn)) for e in range(count)],
            f"{n}.norm1": [(f"{n}.norm1", (hidden,))],
            f"{n}.norm2": [(f"{n}.norm2", (hidden,))],
        }
    return model | {"norm": [("norm", (hidden,))]}


def shape_of(name: str) -> Fused:
    kind, _, layers = name.partition(":")
    return dense() if kind == "dense" else experts(int(layers))


def manifest_of(model: Fused) -> Manifest:
    specs = (spec for parts in model.values() for spec in parts)
    return Manifest(tensors=tuple(TensorSpec(name=name, dtype="bfloat16", shape=shape) for name, shape in specs))


def layout_of(model: Fused, manifest: Manifest) -> Layout:
    placements: list[Placement] = []
    parameters: list[Parameter] = []
    source = 0
    for number, (name, parts) in enumerate(model.items()):
        filled = 0
        for _ in parts:
            elements = manifest.tensors[source].elements
            whole, place = Block.contiguous(0, elements), Block.contiguous(filled, elements)
            placements.append(Placement(source, whole, number, place))
            filled += elements
            source += 1
        parameters.append(Parameter(name, "bfloat16", filled))
    return build_layout(manifest, parameters, placements, {}, "made by hand")


def fill(tensor: torch.Tensor, source: int, version: int) -> torch.Tensor:
    """Values that both sides can make: equal on equal devices."""
    generator = torch.Generator(tensor.device).manual_seed(version * 1_000_003 + source)
    return tensor.normal_(generator=generator)


class Side:
    """One process: its group, and a word that all ranks exchange before each measured round."""

    def __init__(self, options: argparse.Namespace, store: SessionStore) -> None:
        self.options = options
        self.device = torch.device("cpu") if TINY else torch.device("cuda", options.device)
        if not TINY:
            torch.cuda.set_device(self.device)
        self.model = shape_of(options.shape)
        self.manifest = manifest_of(self.model)
        self.layout = layout_of(self.model, self.manifest)
        self.store = store
        self.group = self.join(options.epoch)

    def join(self, epoch: int) -> Group:
        wire = Wire.GLOO if TINY else Wire.NCCL
        return form_group(wire, self.store, epoch, self.options.rank, self.options.world, self.device, 120)

    def until(self) -> float:
        return time.monotonic() + 120

    def meet(self) -> None:
        word = torch.zeros(16, dtype=torch.uint8, device=self.device)
        for other in range(1, self.options.world):
            if self.options.rank == 0:
                self.group.receive(word, other, self.until())
            elif self.options.rank == other:
                self.group.send(word, 0, self.until())
        self.group.broadcast(word, 0, self.until())
        self.group.synchronize(self.until())

    def leave(self) -> None:
        """Closes the group when all are done: who leaves earlier counts as lost to those that still move tensors."""
        self.meet()
        if self.options.rank == 0:
            time.sleep(1)
        self.group.close()

    def timed(self, work: Callable[[], Any], ahead: Callable[[], Any] = lambda: None) -> list[float]:
        """Seconds of ``work``, each round begun by all ranks together after ``ahead``; two rounds warm up."""
        times = []
        for _ in range(ROUNDS + 2):
            ahead()
            self.meet()
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return times[2:]

    def floor(self) -> list[float]:
        """Seconds of a broadcast of as many bytes, in chunks of 1 GiB."""
        chunk = torch.zeros(min(CHUNK, self.manifest.nbytes), dtype=torch.uint8, device=self.device)

        def broadcast() -> None:
            left = self.manifest.nbytes
            while left:
                part = chunk[: min(left, CHUNK)]
                self.group.broadcast(part, 0, self.until())
                left -= part.numel()
            self.group.synchronize(self.until())

        return self.timed(broadcast)

    def arm(self) -> None:
        """Kills this process a little later, when it was told to; where a transfer takes no time, before it takes part in one."""
        if self.options.die_after is not None:
            if TINY:
                time.sleep(self.options.die_after)
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Timer(self.options.die_after, os.kill, (os.getpid(), signal.SIGKILL)).start()


def without_digests(end: Pusher | Puller) -> None:
    """Takes the sums out of a prepared transfer, to see what they cost; both sides then compare zeros."""
    for step in end._steps:
        step.sums = [] if isinstance(end, Pusher) else None


def trainer(options: argparse.Namespace) -> int:
    store = host_store(hold_listening_socket("127.0.0.1"), 120)
    say(port=store.store.port)
    side = Side(options, store)
    tensors = {
        spec.name: fill(torch.empty(spec.shape, dtype=torch.bfloat16, device=side.device), source, 1)
        for source, spec in enumerate(side.manifest.tensors)
    }
    source = NamedTensors(tensors)
    source.bind(side.manifest)
    layouts = dict.fromkeys(range(1, options.world), side.layout)

    def pusher_of(route: Route | None) -> Pusher:
        made = Pusher(side.group, side.manifest, layouts, [whole_holdings(side.manifest)], route, deadline=side.until())
        made.aim(source)
        return made

    pusher = pusher_of(None)
    if options.kill:
        say(prepared=True)
        began = time.perf_counter()
        side.arm()
        try:
            pusher.push(source, side.until())
        except OSError as error:
            say(freed=time.perf_counter() - began, error=f"{type(error).__name__}: {error}")
        side.group = side.join(options.epoch + 1)
        pusher = pusher_of(None)
        pusher.push(source, side.until())
        return 0
    for version in (1, 2):
        for number, spec in enumerate(side.manifest.tensors):
            fill(tensors[spec.name], number, version)
        side.meet()
        pusher.push(source, side.until())
    floor = side.floor()
    say(what="floor", seconds=floor)
    for route, digests in ((None, True), (None, False), (Route.EACH, True)):
        pusher = pusher_of(route)
        if not digests:
            without_digests(pusher)
        last: list[Any] = []

        def push(pusher: Pusher = pusher, last: list[Any] = last) -> None:
            last[:] = [pusher.push(source, side.until())]

        times = side.timed(push, lambda pusher=pusher: pusher.aim(source))
        parts = dict(last[0].seconds)
        say(
            what="push",
            route=str(route or "default"),
            digests=digests,
            seconds=times,
            parts=parts,
            nbytes=last[0].nbytes,
        )
    side.leave()
    return 0


def worker(options: argparse.Namespace) -> int:
    side = Side(options, connect_store("127.0.0.1", options.port, 120))
    live = {
        parameter.name: torch.zeros(parameter.elements, dtype=torch.bfloat16, device=side.device)
        for parameter in side.layout.parameters
    }
    digests = [side.layout.digest] * (options.world - 1)

    def puller_of(route: Route | None) -> Puller:
        held = [whole_holdings(side.manifest)]
        return Puller(side.group, side.manifest, side.layout, held, digests, live, route, deadline=side.until())

    puller = puller_of(None)
    if options.kill:
        say(prepared=True)
        began = time.perf_counter()
        side.arm()
        try:
            puller.pull(side.until(), lambda _: None)
        except OSError as error:
            say(freed=time.perf_counter() - began, error=f"{type(error).__name__}: {error}")
        return 0
    right = True
    for version in (1, 2):
        side.meet()
        puller.pull(side.until(), lambda _: None)
        right = right and holds(side, live, version)
    say(right=right)
    side.floor()
    for route, summed in ((None, True), (None, False), (Route.EACH, True)):
        puller = puller_of(route)
        if not summed:
            without_digests(puller)
        times = side.timed(lambda puller=puller: puller.pull(side.until(), lambda _: None))
        say(what="pull", route=str(route or "default"), digests=summed, seconds=times)
    side.leave()
    return 0 if right else 1


def holds(side: Side, live: dict[str, torch.Tensor], version: int) -> bool:
    """Whether every parameter is what torch concatenates from the trainer's tensors of this version."""
    source = 0
    for name, parts in side.model.items():
        wanted = []
        for _, shape in parts:
            wanted.append(fill(torch.empty(shape, dtype=torch.bfloat16, device=side.device), source, version).flatten())
            source += 1
        if not torch.equal(live[name], torch.cat(wanted)):
            say(wrong=name)
            return False
    return True


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


class Process:
    """A rank as a process of its own; reads what it says."""

    def __init__(self, role: str, rank: int, world: int, shape: str, *more: str) -> None:
        gpus = torch.cuda.device_count()
        alone = {} if gpus > 1 else {"NCCL_HOSTID": f"{role}-{rank}"}
        command = [sys.executable, str(Path(__file__)), "--role", role, "--rank", str(rank), "--world", str(world)]
        command += ["--device", str(rank if gpus > 1 else 0), "--shape", shape, *more]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **alone})

    def lines(self) -> Iterator[dict[str, Any]]:
        for line in self.process.stdout:
            if line.startswith("{"):
                yield json.loads(line)

    def line(self) -> dict[str, Any]:
        return next(self.lines(), {})

    def end(self) -> int:
        return self.process.wait(120)


def measure(shape: str, world: int) -> bool:
    """Bytes and seconds of one shape."""
    first = Process("trainer", 0, world, shape)
    port = str(first.line()["port"])
    others = [Process("worker", rank, world, shape, "--port", port) for rank in range(1, world)]
    said = list(first.lines())
    heard = [list(other.lines()) for other in others]
    right = not any([each.end() for each in (first, *others)])  # noqa: C419 - every one is waited for
    floor = statistics.median(next(line["seconds"] for line in said if line.get("what") == "floor"))
    nbytes = manifest_of(shape_of(shape)).nbytes
    say(shape=shape, world=world, nbytes=nbytes, right=right, floor_seconds=floor, floor_gb_s=nbytes / floor / 1e9)
    for number, line in enumerate(line for line in said if line.get("what") == "push"):
        pulls = [[each for each in lines if each.get("what") == "pull"][number]["seconds"] for lines in heard]
        slowest = statistics.median(map(max, zip(line["seconds"], *pulls, strict=True)))
        say(
            shape=shape,
            route=line["route"],
            digests=line["digests"],
            seconds=slowest,
            times_floor=slowest / floor,
            parts=line["parts"],
        )
    return right


def kill(shape: str, victim: str) -> bool:
    """Whether the other side is free soon after a kill in mid-transfer, and a new group works where the trainer lives."""
    dying = ["--die-after", "0.02"]
    first = Process("trainer", 0, 2, shape, "--kill", *(dying if victim == "trainer" else []))
    port = str(first.line()["port"])
    other = Process("worker", 1, 2, shape, "--kill", "--port", port, *(dying if victim == "worker" else []))
    assert first.line().get("prepared")
    assert other.line().get("prepared")
    survivor = first if victim == "worker" else other
    word = survivor.line()
    fine = 0 <= word.get("freed", -1) < FREED_SECONDS
    say(shape=shape, killed=victim, fine=fine, **word)
    if victim == "worker":
        again = Process("worker", 1, 2, shape, "--kill", "--port", port, "--epoch", "2")
        fine = first.end() == 0 and again.end() == 0 and fine
        say(shape=shape, regrouped=fine)
    for process in (first, other):
        process.process.kill()
        process.end()
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=("all", "trainer", "worker"), default="all")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=0)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--epoch", type=int, default=1)
    parser.add_argument("--shape", default="dense")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--die-after", type=float)
    options = parser.parse_args()
    if options.role == "trainer":
        return trainer(options)
    if options.role == "worker":
        return worker(options)
    gpus = 0 if TINY else torch.cuda.device_count()
    layers = 2 if TINY else 8 if gpus < 2 else 48
    world = 3 if TINY else max(gpus, 2)
    fine = [measure("dense", world), measure(f"moe:{layers}", world)]
    fine += [kill("dense", victim) for victim in ("worker", "trainer")]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
