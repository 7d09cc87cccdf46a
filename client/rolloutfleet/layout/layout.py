"""Where the tensors of a manifest lie in one rank's live parameters."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field

from rolloutfleet.contract.manifest import DTYPE_BYTES, Manifest, repeated_names
from rolloutfleet.layout.blocks import Block, first_overlap, join
from rolloutfleet.layout.codec import block_columns, canonical_bytes, compress, decompress, read_blocks, read_columns

NOT_COMPARED: Final = "not yet compared with a load through vLLM's loader"
"""Why every tensor takes the detour at first."""

_KIND: Final = "rolloutfleet layout 1"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One flat, contiguous piece of memory that tensors are received into."""

    name: str
    dtype: str
    elements: int
    temporary: bool = False
    """Whether the receiver allocates it for a source tensor of this name, and gives it to vLLM's loader once it is complete."""

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True, slots=True)
class Placement:
    """A block of a source tensor and the block of a parameter that takes its elements, one by one in the order of both.

    The values have the parameter's dtype: a sender casts its tensor before anything else.
    """

    source: int
    """Index in the manifest."""
    source_block: Block
    parameter: int
    """Index in the layout."""
    block: Block


@dataclass(frozen=True, slots=True)
class Detour:
    """A source tensor that goes through vLLM's loader, and why."""

    source: int
    reason: str


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    manifest: str
    shape: str
    names: list[str]
    dtypes: list[str]
    reasons: list[str]
    detours: int = Field(ge=0)
    placements: int = Field(ge=0)


@dataclass(frozen=True)
class Layout:
    """For one rank and one manifest: which block of which source tensor lies where in which parameter.

    Live parameters come first; then one temporary for each detour, in the order of their sources, which takes its tensor whole.
    Placements are ordered by parameter and offset. Raises ValueError, which names what is wrong, for indices out of range, blocks that
    leave their parameter, differ in size on both sides or overlap each other in a parameter, and temporaries that do not fit the
    detours. What the manifest has to say is left to :meth:`check`.
    """

    manifest_digest: str
    parameters: tuple[Parameter, ...]
    placements: tuple[Placement, ...]
    detours: tuple[Detour, ...]
    shape: str
    """Digest of the rank's live shapes, see :func:`rolloutfleet.layout.shapes.shape_digest`."""

    def __post_init__(self) -> None:
        _check_parameters(self.parameters, len(self.detours))
        _check_placements(self.parameters, self.placements)
        _check_detours(self)

    @property
    def live(self) -> tuple[Parameter, ...]:
        """The parameters that are part of the model."""
        return self.parameters[: len(self.parameters) - len(self.detours)]

    @property
    def temporaries(self) -> tuple[Parameter, ...]:
        """One for each detour, in the same order."""
        return self.parameters[len(self.parameters) - len(self.detours) :]

    @cached_property
    def placed_bytes(self) -> int:
        """Bytes that are written straight into live parameters."""
        live = len(self.live)
        return sum(
            placement.block.elements * self.parameters[placement.parameter].itemsize
            for placement in self.placements
            if placement.parameter < live
        )

    @cached_property
    def detoured_bytes(self) -> int:
        """Bytes of the source tensors that go through vLLM's loader."""
        return sum(parameter.nbytes for parameter in self.temporaries)

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of the canonical bytes: ranks with equal digests can receive the same messages."""
        return hashlib.sha256(self._canonical()).hexdigest()

    def encode(self) -> bytes:
        """Compact bytes that are equal for equal layouts."""
        return compress(self._canonical())

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The layout that was encoded.

        Raises ValueError, which names what is wrong, for bytes that are damaged or describe no consistent layout.
        """
        text, body = decompress(_KIND, data)
        header = _Header.model_validate_json(text)
        count, detours, names = header.placements, header.detours, len(header.names)
        if len(header.dtypes) != names:
            raise ValueError(f"{_KIND}: {names} parameters have {len(header.dtypes)} dtypes")
        columns = read_columns(_KIND, body, [names, detours, detours, *[count] * 10])
        elements, detoured, reasons, sources, parameters = columns[:5]
        if any(not 0 <= reason < len(header.reasons) for reason in reasons):
            raise ValueError(f"{_KIND}: a detour's reason is not one of the {len(header.reasons)} that are listed")
        return cls(
            manifest_digest=header.manifest,
            parameters=tuple(
                Parameter(*entry, temporary=index >= names - detours)
                for index, entry in enumerate(zip(header.names, header.dtypes, elements, strict=True))
            ),
            placements=tuple(
                map(Placement, sources, read_blocks(_KIND, columns[5:9]), parameters, read_blocks(_KIND, columns[9:]))
            ),
            detours=tuple(map(Detour, detoured, (header.reasons[reason] for reason in reasons))),
            shape=header.shape,
        )

    def check(self, manifest: Manifest) -> None:
        """Raises ValueError when this is not a layout of the manifest, or takes elements that its tensors do not have."""
        digest = manifest.digest()
        if self.manifest_digest != digest:
            raise ValueError(f"the layout is of manifest {self.manifest_digest}, not of {digest}")
        sizes = [spec.elements for spec in manifest.tensors]
        for placement in self.placements:
            if placement.source >= len(sizes) or placement.source_block.end > sizes[placement.source]:
                raise ValueError(
                    f"parameter {self.parameters[placement.parameter].name} takes {placement.source_block} of "
                    f"{_described(manifest, placement.source)}"
                )
        for detour, parameter in zip(self.detours, self.temporaries, strict=True):
            spec = manifest.tensors[detour.source] if detour.source < len(sizes) else None
            if spec is None or (spec.name, spec.dtype, spec.elements) != (
                parameter.name,
                parameter.dtype,
                parameter.elements,
            ):
                raise ValueError(
                    f"temporary {parameter.name} of {parameter.elements} elements of {parameter.dtype} cannot take "
                    f"{_described(manifest, detour.source)}"
                )

    def reasons(self, limit: int = 8) -> tuple[str, ...]:
        """Why tensors take the detour: for each reason how many do, the first of them and the reason; commonest first."""
        names: dict[str, list[str]] = {}
        for detour, parameter in zip(self.detours, self.temporaries, strict=True):
            names.setdefault(detour.reason, []).append(parameter.name)
        ordered = sorted(names.items(), key=lambda item: (-len(item[1]), item[0]))
        return tuple(
            f"{those[0]}: {reason}" if len(those) == 1 else f"{len(those)} tensors, {those[0]} first: {reason}"
            for reason, those in ordered[:limit]
        )

    def _canonical(self) -> bytes:
        reasons = sorted({detour.reason for detour in self.detours})
        numbers = {reason: number for number, reason in enumerate(reasons)}
        header = _Header(
            manifest=self.manifest_digest,
            shape=self.shape,
            names=[parameter.name for parameter in self.parameters],
            dtypes=[parameter.dtype for parameter in self.parameters],
            reasons=reasons,
            detours=len(self.detours),
            placements=len(self.placements),
        )
        columns = (
            [parameter.elements for parameter in self.parameters],
            [detour.source for detour in self.detours],
            [numbers[detour.reason] for detour in self.detours],
            [placement.source for placement in self.placements],
            [placement.parameter for placement in self.placements],
            *block_columns([placement.source_block for placement in self.placements]),
            *block_columns([placement.block for placement in self.placements]),
        )
        return canonical_bytes(_KIND, header.model_dump(), columns)


def build_layout(
    manifest: Manifest,
    parameters: Sequence[Parameter],
    placements: Iterable[Placement],
    detours: Mapping[int, str],
    shape: str,
) -> Layout:
    """The layout of these live parameters and placements, with a temporary for each detoured source (index to reason).

    Placements may come in any order, and as finely cut as a loader copies: those that go on from one another are joined.
    Raises ValueError as :class:`Layout` and :meth:`Layout.check` do.
    """
    everything, placed = list(parameters), list(placements)
    for source in sorted(detours):
        if not 0 <= source < len(manifest.tensors):
            raise ValueError(f"tensor {source} cannot take a detour; the manifest has {len(manifest.tensors)}")
        spec = manifest.tensors[source]
        if spec.elements:
            whole = Block.contiguous(0, spec.elements)
            placed.append(Placement(source, whole, len(everything), whole))
        everything.append(Parameter(spec.name, spec.dtype, spec.elements, temporary=True))
    placed.sort(key=lambda placement: (placement.parameter, placement.block.offset))
    layout = Layout(
        manifest_digest=manifest.digest(),
        parameters=tuple(everything),
        placements=tuple(_joined(placed)),
        detours=tuple(Detour(source, detours[source]) for source in sorted(detours)),
        shape=shape,
    )
    layout.check(manifest)
    return layout


def checkpoint_layout(manifest: Manifest, shape: str = "", reason: str = NOT_COMPARED) -> Layout:
    """The layout in which every tensor takes the detour: what a rank uses until its own has been compared with a load."""
    return build_layout(manifest, (), (), dict.fromkeys(range(len(manifest.tensors)), reason), shape)


def _joined(placements: Iterable[Placement]) -> Iterator[Placement]:
    last: Placement | None = None
    for placement in placements:
        joined = None
        if last is not None and (last.source, last.parameter) == (placement.source, placement.parameter):
            sides = join(last.source_block, placement.source_block), join(last.block, placement.block)
            if sides[0] and sides[1]:
                joined = Placement(placement.source, sides[0], placement.parameter, sides[1])
        if last is not None and joined is None:
            yield last
        last = joined or placement
    if last is not None:
        yield last


def _described(manifest: Manifest, source: int) -> str:
    if source >= len(manifest.tensors):
        return f"tensor {source}; the manifest has {len(manifest.tensors)}"
    spec = manifest.tensors[source]
    return f"{spec.name}, which has {spec.elements} elements of {spec.dtype}"


def _check_parameters(parameters: Sequence[Parameter], detours: int) -> None:
    live = len(parameters) - detours
    if live < 0:
        raise ValueError(f"{len(parameters)} parameters cannot hold a temporary for each of {detours} detours")
    for index, parameter in enumerate(parameters):
        if parameter.dtype not in DTYPE_BYTES or parameter.elements < 0:
            raise ValueError(
                f"parameter {parameter.name} of {parameter.elements} elements of {parameter.dtype!r}: dtype must be one of "
                f"{', '.join(sorted(DTYPE_BYTES))}, and elements at least 0"
            )
        if parameter.temporary != (index >= live):
            raise ValueError(
                f"parameter {index}, {parameter.name}: of {len(parameters)} parameters just the last {detours} must be "
                f"temporary, one for each detour"
            )
    for several in (parameters[:live], parameters[live:]):
        repeated = sorted(repeated_names([parameter.name for parameter in several]))
        if repeated:
            raise ValueError(f"layout names these parameters more than once: {', '.join(repeated)}")


def _check_placements(parameters: Sequence[Parameter], placements: Sequence[Placement]) -> None:
    for index, placement in enumerate(placements):
        if not 0 <= placement.parameter < len(parameters) or placement.source < 0:
            raise ValueError(
                f"placement {index} puts tensor {placement.source} into parameter {placement.parameter} of {len(parameters)}"
            )
        name, block = parameters[placement.parameter].name, placement.block
        if block.end > parameters[placement.parameter].elements:
            raise ValueError(
                f"placement {index}: {block} leaves {name} of {parameters[placement.parameter].elements} elements"
            )
        if placement.source_block.elements != block.elements:
            raise ValueError(
                f"placement {index}: {placement.source_block.elements} elements of tensor {placement.source} cannot fill "
                f"{block.elements} of {name}"
            )
    for index, (before, after) in enumerate(pairwise(placements), start=1):
        if (before.parameter, before.block.offset) >= (after.parameter, after.block.offset):
            raise ValueError(
                f"placement {index}, into {parameters[after.parameter].name} from element {after.block.offset}, "
                "does not come after the one before it by parameter and offset"
            )
    for number, those in groupby(placements, key=lambda placement: placement.parameter):
        clash = first_overlap([placement.block for placement in those])
        if clash:
            raise ValueError(f"two placements overlap in {parameters[number].name}: {clash[0]} and {clash[1]}")


def _check_detours(layout: Layout) -> None:
    for before, after in pairwise((-1, *(detour.source for detour in layout.detours))):
        if before >= after:
            raise ValueError(f"detours must have ascending sources from 0 on; {after} comes after {before}")
    live = len(layout.live)
    filled: dict[int, Placement] = {}
    for placement in layout.placements:
        if placement.parameter >= live and filled.setdefault(placement.parameter, placement) is not placement:
            raise ValueError(f"temporary {layout.parameters[placement.parameter].name} has more than one placement")
    for index, (detour, parameter) in enumerate(zip(layout.detours, layout.temporaries, strict=True), start=live):
        found = filled.get(index)
        whole = Block.contiguous(0, parameter.elements) if parameter.elements else None
        if (found and (found.source, found.source_block, found.block)) != (whole and (detour.source, whole, whole)):
            raise ValueError(
                f"temporary {parameter.name} does not take tensor {detour.source} whole, as its detour demands"
            )
