"""Tying work to the client's connection: when the client leaves, the work is cancelled and cleaned up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def run_while_connected(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Run ``work``, in one task from start to end, while the client stays.

    The request's body must have been read. ``work`` is cancelled once, and has ended its cleanup when this
    returns, both when the client leaves (uvicorn says ``http.disconnect``) and when the calling task is cancelled
    (what Ray Serve does when the client leaves).

    Raises:
        ClientDisconnect: the client left before ``work`` was done.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        worker.cancel()  # nothing happens to a task that is done
        watcher.cancel()
        await asyncio.wait({worker, watcher})
    if worker.cancelled() and not watcher.cancelled():
        watcher.result()  # raises what the server's `receive` may have failed with
        raise ClientDisconnect
    return worker.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def closing(items: AsyncIterator[T]) -> AsyncGenerator[AsyncIterator[T], None]:
    """Close ``items`` at the end, where it is a generator: at once, and not when the collector finds it."""
    try:
        yield items
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()
