"""Frames on the Unix socket between the launcher and its rank processes: a four-byte length, then JSON."""

import asyncio
import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!I")
LARGEST_FRAME = 256 * 1024 * 1024

Frame = dict[str, Any]


def encode(frame: Frame) -> bytes:
    """The frame as bytes, length first."""
    body = json.dumps(frame, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame, or None when the peer has closed."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        body = await reader.readexactly(_checked(size))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None
    return _decoded(body)


def receive_frame(connection: socket.socket) -> Frame | None:
    """The next frame from a blocking socket, or None when the peer has closed."""
    head = _receive_exactly(connection, _LENGTH.size)
    if head is None:
        return None
    body = _receive_exactly(connection, _checked(_LENGTH.unpack(head)[0]))
    return None if body is None else _decoded(body)


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _checked(size: int) -> int:
    if size > LARGEST_FRAME:
        raise ValueError(f"frame of {size} bytes, at most {LARGEST_FRAME} are allowed")
    return size


def _decoded(body: bytes) -> Frame:
    frame = json.loads(body)
    if not isinstance(frame, dict):
        raise TypeError(f"frame is a {type(frame).__name__}, not an object")
    return frame
