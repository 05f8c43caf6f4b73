"""A TCP proxy that loses what a server answers, as a network does that breaks at the worst moment."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Proxy:
    """Forwards to one server; `lossy_proxy` starts it."""

    def __init__(self, target: str) -> None:
        self.host, _, port = target.rpartition(":")
        self.port = int(port)
        self.endpoint = ""
        self.delay_s = 0.0
        """By how much each answer is late."""
        self.lose_answers = False
        """The next answer is swallowed, and its connection cut."""
        self.lost = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side closes it."""
        from_server, to_server = await asyncio.open_connection(self.host, self.port)
        both = (
            asyncio.ensure_future(self._forward(reader, to_server, answers=False)),
            asyncio.ensure_future(self._forward(from_server, writer, answers=True)),
        )
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            to_server.close()
            writer.close()

    async def _forward(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        with contextlib.suppress(OSError):  # either side may go at any moment
            while data := await source.read(65536):
                # etcd acknowledges a request in small frames at once; an answer is longer.
                if answers and self.lose_answers and len(data) > 64:
                    self.lose_answers = False
                    self.lost.set()
                    return
                await asyncio.sleep(self.delay_s if answers else 0.0)
                sink.write(data)
                await sink.drain()


@asynccontextmanager
async def lossy_proxy(target: str) -> AsyncIterator[Proxy]:
    """A proxy to ``host:port``, on a free port of its own."""
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
