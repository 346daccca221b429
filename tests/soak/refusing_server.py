"""A server that answers every request 503 once its head is there: what a crowd costs a machine by itself.

`python -m tests.soak.refusing_server`. Says its port on its standard output, and serves until it is killed.
"""

from __future__ import annotations

import asyncio

REPLY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One client, which may send on until it has read the reply."""
    try:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(REPLY)
        writer.write_eof()
        while await reader.read(2**16):
            pass
    except (OSError, EOFError, asyncio.LimitOverrunError):
        pass
    finally:
        writer.transport.abort()


async def main() -> None:
    """On any free port of this machine."""
    server = await asyncio.start_server(refuse, "127.0.0.1", 0, limit=2**20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
