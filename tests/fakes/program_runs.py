"""Programs executed over small numpy arrays, as a trainer's ranks and a worker's rank would, and layouts evaluated without any program."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.layout import ALIGNMENT, Block, Holdings, Layout, Message, Program

Array = NDArray[np.generic]

NOTHING = 0x55
"""What fills the bytes of memory that nothing was written to."""


def indices(block: Block) -> NDArray[np.int64]:
    """The numbers of the block's elements, in its order."""
    rows = block.offset + block.stride * np.arange(block.rows)
    return (rows[:, None] + np.arange(block.run)).reshape(-1)


def random_sources(manifest: Manifest, seed: int) -> list[Array]:
    """Flat arrays of random bytes in each tensor's dtype."""
    random = np.random.default_rng(seed)
    return [np.frombuffer(random.bytes(spec.nbytes), dtype=spec.dtype) for spec in manifest.tensors]


def evaluate(layout: Layout, sources: Sequence[Array]) -> list[Array]:
    """The layout's parameters after each placement was assigned by itself."""
    parameters = _blank(layout)
    for placement in layout.placements:
        target = parameters[placement.parameter]
        target[indices(placement.block)] = sources[placement.source][indices(placement.source_block)].astype(
            target.dtype
        )
    return parameters


def execute(program: Program, layout: Layout, holdings: Sequence[Holdings], sources: Sequence[Array]) -> list[Array]:
    """The layout's parameters after every message was sent from what its sender holds, and received."""
    held: Mapping[int, Holdings] = {each.rank: each for each in holdings}
    parameters = _blank(layout)
    for message in program.messages:
        _receive(message, _payload(message, layout, held[message.sender], sources), parameters)
    return parameters


def _blank(layout: Layout) -> list[Array]:
    return [np.full(p.nbytes, NOTHING, np.uint8).view(p.dtype) for p in layout.parameters]


def _payload(message: Message, layout: Layout, held: Holdings, sources: Sequence[Array]) -> NDArray[np.uint8]:
    payload = np.full(message.nbytes, NOTHING, np.uint8)
    for part in message.parts:
        wanted = indices(part.source_block)
        assert any(
            piece.source == part.source and np.isin(wanted, indices(piece.block)).all() for piece in held.pieces
        ), f"{message.sender} holds {part.source_block} of {part.source} in no one piece"
        data = sources[part.source][wanted].astype(layout.parameters[part.parameter].dtype).view(np.uint8)
        assert message.direct or part.position % ALIGNMENT == 0
        assert part.position + len(data) <= message.nbytes
        payload[part.position : part.position + len(data)] = data
    return payload


def _receive(message: Message, payload: NDArray[np.uint8], parameters: Sequence[Array]) -> None:
    if message.direct:
        parameter, run = message.run
        values = payload.view(parameters[parameter].dtype)
        assert len(values) == run.run
        parameters[parameter][run.offset : run.end] = values
        return
    for part in message.parts:
        target = parameters[part.parameter]
        nbytes = part.block.elements * target.itemsize
        target[indices(part.block)] = payload[part.position : part.position + nbytes].copy().view(target.dtype)
