"""Which block of which tensor goes where, and the messages that carry it there: pure, alike on trainer and workers."""

from rolloutfleet.layout.blocks import Block, block_of, first_overlap, overlap, pair, region, section, select, subtract
from rolloutfleet.layout.holdings import Holdings, Piece, whole_holdings
from rolloutfleet.layout.layout import (
    NOT_COMPARED,
    Detour,
    Layout,
    Parameter,
    Placement,
    build_layout,
    checkpoint_layout,
)
from rolloutfleet.layout.packing import ALIGNMENT
from rolloutfleet.layout.program import Completion, Message, Part, Program, plan_program
from rolloutfleet.layout.shapes import shape_digest

__all__ = [
    "ALIGNMENT",
    "NOT_COMPARED",
    "Block",
    "Completion",
    "Detour",
    "Holdings",
    "Layout",
    "Message",
    "Parameter",
    "Part",
    "Piece",
    "Placement",
    "Program",
    "block_of",
    "build_layout",
    "checkpoint_layout",
    "first_overlap",
    "overlap",
    "pair",
    "plan_program",
    "region",
    "section",
    "select",
    "shape_digest",
    "subtract",
    "whole_holdings",
]
