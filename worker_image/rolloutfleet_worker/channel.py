"""Where frames come from and go to: a rank process of this pod on a Unix socket, or one of another pod by way of its launcher."""

import asyncio
import json
from typing import Protocol

import aiohttp
from aiohttp import web

from rolloutfleet_worker.wire import Frame, encode, read_frame

HEARTBEAT_SECONDS = 10.0
"""A launcher that has not answered half as long after a ping counts as gone: its node may have lost its network."""


class Channel(Protocol):
    """One peer."""

    async def send(self, frame: Frame) -> None:
        """Raises ConnectionError when the peer is gone."""

    async def receive(self) -> Frame | None:
        """The next frame; None when the peer is gone."""

    async def close(self) -> None: ...


class StreamChannel:
    """A process on the same machine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, frame: Frame) -> None:
        self._writer.write(encode(frame))
        await self._writer.drain()

    async def receive(self) -> Frame | None:
        return await read_frame(self._reader)

    async def close(self) -> None:
        self._writer.close()


class SocketChannel:
    """A launcher in another pod."""

    def __init__(self, socket: web.WebSocketResponse | aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def send(self, frame: Frame) -> None:
        await self._socket.send_str(json.dumps(frame, separators=(",", ":")))

    async def receive(self) -> Frame | None:
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            return None
        frame = json.loads(message.data)
        if not isinstance(frame, dict):
            raise TypeError(f"frame is a {type(frame).__name__}, not an object")
        return frame

    async def close(self) -> None:
        await self._socket.close()
