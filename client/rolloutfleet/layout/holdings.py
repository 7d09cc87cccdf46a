"""What a trainer rank has of the source tensors."""

from dataclasses import dataclass
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field

from rolloutfleet.contract.manifest import Manifest
from rolloutfleet.layout.blocks import Block
from rolloutfleet.layout.codec import block_columns, canonical_bytes, compress, decompress, read_blocks, read_columns

_KIND: Final = "rolloutfleet holdings 1"


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a source tensor that a trainer rank holds; how it lies in the rank's memory is the source's own business."""

    source: int
    """Index in the manifest."""
    block: Block


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    rank: int = Field(ge=0)
    pieces: int = Field(ge=0)


@dataclass(frozen=True, slots=True)
class Holdings:
    """All pieces of one trainer rank, ordered by source and offset."""

    rank: int
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        ordered = sorted(set(self.pieces), key=_order)
        object.__setattr__(self, "pieces", tuple(ordered))

    def encode(self) -> bytes:
        """Compact bytes that are equal for equal holdings."""
        columns = ([piece.source for piece in self.pieces], *block_columns([piece.block for piece in self.pieces]))
        return compress(canonical_bytes(_KIND, {"rank": self.rank, "pieces": len(self.pieces)}, columns))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The holdings that were encoded.

        Raises ValueError, which names what is wrong, for bytes that are damaged or describe impossible blocks.
        """
        text, body = decompress(_KIND, data)
        header = _Header.model_validate_json(text)
        sources, *geometry = read_columns(_KIND, body, [header.pieces] * 5)
        return cls(header.rank, tuple(map(Piece, sources, read_blocks(_KIND, geometry))))

    def check(self, manifest: Manifest) -> None:
        """Raises ValueError when a piece names a tensor that the manifest does not have, or leaves its tensor."""
        for piece in self.pieces:
            if not 0 <= piece.source < len(manifest.tensors):
                raise ValueError(
                    f"trainer rank {self.rank} holds a piece of tensor {piece.source}; the manifest has {len(manifest.tensors)}"
                )
            spec = manifest.tensors[piece.source]
            if piece.block.end > spec.elements:
                raise ValueError(
                    f"trainer rank {self.rank} holds {piece.block} of {spec.name}, which has {spec.elements} elements"
                )


def whole_holdings(manifest: Manifest, rank: int = 0) -> Holdings:
    """The holdings of a trainer rank that has every tensor whole."""
    return Holdings(
        rank,
        tuple(
            Piece(source, Block.contiguous(0, spec.elements))
            for source, spec in enumerate(manifest.tensors)
            if spec.elements
        ),
    )


def _order(piece: Piece) -> tuple[int, int, int, int, int]:
    return piece.source, piece.block.offset, piece.block.rows, piece.block.run, piece.block.stride
