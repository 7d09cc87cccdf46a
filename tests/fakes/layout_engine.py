"""A small engine that takes weights by layout, over gloo or from the trainer's shared memory, into one flat parameter."""

import asyncio
import threading
import time
from typing import Any

import torch

from fakes.served_fleet import SmallEngine
from rolloutfleet.colocation import Showcase, await_exports
from rolloutfleet.contract.manifest import Manifest, ManifestFaults
from rolloutfleet.contract.policy import Wire
from rolloutfleet.contract.worker import (
    CheckReport,
    JoinReport,
    LayoutSummary,
    PrepareReport,
    ReceiveReport,
    WorkerReport,
    WorkerState,
)
from rolloutfleet.layout.blocks import Block
from rolloutfleet.layout.layout import Layout, Parameter, Placement
from rolloutfleet.layout.program import plan_program
from rolloutfleet.locality import locality
from rolloutfleet.tiles.copying import CopyTable
from rolloutfleet.tiles.digesting import SumTable, sums_digest
from rolloutfleet.transport.exchange import await_holdings, await_layouts, publish_layout
from rolloutfleet.transport.group import form_group
from rolloutfleet.transport.memory import Mapper
from rolloutfleet.transport.pulling import Puller
from rolloutfleet.transport.routes import MESSAGE_BYTES
from rolloutfleet.transport.store import connect_store

SECONDS = 60.0


def flat_layout(manifest: Manifest, dtype: str) -> Layout:
    """All tensors one after another in one parameter."""
    placements, offset = [], 0
    for source, spec in enumerate(manifest.tensors):
        block = Block.contiguous(0, spec.elements)
        placements.append(Placement(source, block, 0, Block.contiguous(offset, spec.elements)))
        offset += spec.elements
    return Layout(manifest.digest(), (Parameter("flat", dtype, offset),), tuple(placements), (), shape=dtype)


class LayoutEngine(SmallEngine):
    """The first engine computes in float32, the second in bfloat16."""

    def __init__(self, engine: int, wire: object) -> None:
        super().__init__(engine, wire)
        self.dtype = "bfloat16" if engine else "float32"
        self.flat = torch.empty(0)
        self._layout: Layout | None = None
        self._store: Any = None
        self._puller: Puller | None = None
        self._ordered: dict[str, Any] = {}

    async def _check(self, body: dict) -> CheckReport:
        manifest = Manifest.model_validate(body["manifest"])
        self._manifests[manifest.digest()] = manifest
        self._layout = flat_layout(manifest, self.dtype)
        self.flat = torch.zeros(self._layout.parameters[0].elements, dtype=getattr(torch, self.dtype))
        summary = LayoutSummary(
            digest=self._layout.digest,
            shape=self._layout.shape,
            placed_bytes=self._layout.placed_bytes,
            detoured_bytes=0,
        )
        return CheckReport(faults=ManifestFaults(), layouts=(summary,))

    async def _join(self, body: dict) -> JoinReport:
        self._ordered, self._rank = body, body["rankOffset"]
        await asyncio.to_thread(self._meet, body)
        return JoinReport(ranks=(self._rank,))

    def _meet(self, body: dict) -> None:
        place = body["rendezvous"]
        self._store = connect_store(place["host"], place["port"], SECONDS)
        if Wire(body["wire"]) is Wire.GLOO:
            self._group = form_group(
                Wire.GLOO, self._store, body["epoch"], self._rank, body["worldSize"], torch.device("cpu"), SECONDS
            )

    async def _prepare(self, body: dict) -> PrepareReport:
        await asyncio.to_thread(self._make_ready, body)
        return PrepareReport(seconds=0.0)

    def _make_ready(self, body: dict) -> None:
        self._ordered = {**self._ordered, "layouts": body["layouts"]}
        publish_layout(self._store, self._layout)
        if self._group is None:
            return
        manifest = self._manifests[body["manifestDigest"]]
        self._puller = Puller(
            self._group,
            manifest,
            self._layout,
            self._holdings(manifest),
            body["layouts"],
            {"flat": self.flat},
            deadline=time.monotonic() + SECONDS,
        )

    def _holdings(self, manifest: Manifest) -> Any:
        deadline = time.monotonic() + SECONDS
        return await_holdings(
            self._store, manifest.digest(), self._ordered["trainerRanks"], deadline, threading.Event()
        )

    async def _receive(self, body: dict) -> ReceiveReport:
        self.state, self.version_in_flight = WorkerState.RECEIVING, body["version"]
        manifest = self._manifests[body["manifestDigest"]]
        if self._group is None:
            self.digest = await asyncio.to_thread(self._copy, manifest, body["version"])
        else:
            pulled = await asyncio.to_thread(self._puller.pull, time.monotonic() + SECONDS, lambda _: None)
            self.digest = pulled.digest
        self.state = WorkerState.RECEIVED
        return ReceiveReport(
            version=body["version"],
            tensors=len(manifest.tensors),
            nbytes=self._layout.placed_bytes,
            received_digests=(self.digest,),
            live_digests=(self.digest,),
            receive_seconds=0.0,
            load_seconds=0.0,
        )

    def _copy(self, manifest: Manifest, version: int) -> str:
        """What a worker rank does without a group: maps every trainer rank's memory, copies, and sums up what it holds."""
        deadline, ordered = time.monotonic() + SECONDS, self._ordered
        holdings = self._holdings(manifest)
        layouts = await_layouts(self._store, ordered["layouts"], deadline).values()
        messages = await_exports(self._store, ordered["epoch"], version, ordered["trainerRanks"], deadline)
        shown = [(Showcase(layouts, held), Mapper(torch.device("cpu"))) for held in holdings]
        tensors = [mapper.map(message) for (_, mapper), message in zip(shown, messages, strict=True)]
        program = plan_program(manifest, self._layout, holdings, MESSAGE_BYTES)
        copies, sums = [], []
        for message in program.messages:
            for part in message.parts:
                showcase, _ = shown[message.sender]
                index, pairs = showcase.find(part.source, part.source_block, self.dtype)
                assert part.block.is_contiguous
                begin = part.block.offset
                for _, place in pairs:
                    target = Block.contiguous(begin, place.elements)
                    copies.append((tensors[message.sender][index], place, self.flat, target))
                    begin += place.elements
                sums.append((self.flat, part.block, part.source, part.source_block, program.units[part.source]))
        CopyTable.build(copies).run()
        return sums_digest(self._layout.digest, SumTable.build(sums, sources=len(manifest.tensors)).run())

    def report(self) -> WorkerReport:
        return super().report().model_copy(update={"locality": locality()})
