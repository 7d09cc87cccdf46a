"""A small engine in a process of its own, to be killed: ``python -m fakes.engine_process NUMBER``; prints its port and serves until then.

Its control surface, its gloo group and its transfers are real; its weights are what it last received.
"""

import asyncio
import sys

from aiohttp import web

from fakes.served_fleet import SmallEngine
from fakes.wires import GlooWire


async def main(number: int) -> None:
    runner = web.AppRunner(SmallEngine(number, GlooWire()).app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
