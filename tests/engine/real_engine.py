"""The real engine process on one rank or several, driven by the real client."""

import asyncio
from pathlib import Path

from server.api.engine_client import EngineClient
from server.messages import Tokens

TIMEOUT_S = 60


def drive(scenario, settings, slab=None, timeout_s=TIMEOUT_S, **options):
    """Run `scenario(client)` against an engine that starts; close it whatever happens."""

    async def bounded():
        client = EngineClient(settings, slab and slab.name, **options)
        async with asyncio.timeout(timeout_s):
            await client.start()
            try:
                await scenario(client)
            finally:
                await client.close()

    asyncio.run(bounded())


async def collect(stream):
    return [event async for event in stream]


def tokens_of(events):
    return [i for event in events if isinstance(event, Tokens) for i in event.token_ids]


def workers_of(client):
    """Process ids of the ranks beside the engine process."""
    children = [path.read_text().split() for path in Path(f"/proc/{client.pid}/task").glob("*/children")]
    pids = [int(pid) for found in children for pid in found]
    return [pid for pid in pids if b"server.rank_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
