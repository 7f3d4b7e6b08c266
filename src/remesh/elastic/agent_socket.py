"""An agent's session on the master's side: a WebSocket.

Each message is passed to the master at once. The master does not wait for an agent that does not
read: the newest instruction replaces one that has not been sent. When the agent closes the session,
the master closes it too, as soon as the journal has what the agent has said. An agent that sends
too much is read more slowly. Data that is no message ends the session.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import count

import msgspec
from aiohttp import WSMsgType, web

from remesh.elastic.master import Connection, Master, RefusedError
from remesh.elastic.protocol import Instruction, Message, Problem

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 8 << 20
"""Larger messages are refused."""
BURST_SECONDS = 5.0
"""A sender that was silent may send the requests of so many seconds at once."""
MAX_SENDERS = 10_000
"""Senders after which those that are silent are forgotten."""
TOO_MANY_PAUSE = 0.5
"""Seconds for which an agent that has sent too much is not read."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode
_numbers = count()


class RateLimit:
    """A bucket of requests for each sender, filled at a steady rate.

    It holds what fills it in `BURST_SECONDS`: nodes meet all at once, and then beat steadily.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._most = MAX_SENDERS

    def allows(self, sender: str) -> bool:
        """True if a request that a sender makes now is answered."""
        now, most = self._clock(), self._per_second * BURST_SECONDS
        if len(self._buckets) >= self._most:
            # A sender that was silent for so long has a full bucket again, as an unknown one.
            self._buckets = {
                other: (left, at)
                for other, (left, at) in self._buckets.items()
                if now - at < BURST_SECONDS
            }
            self._most = max(MAX_SENDERS, 2 * len(self._buckets))
        left, at = self._buckets.get(sender, (most, now))
        left = min(left + (now - at) * self._per_second, most)
        allowed = left >= 1
        self._buckets[sender] = (left - allowed, now)
        return allowed


class AgentSocket:
    """The session of one agent."""

    def __init__(self, master: Master, limit: RateLimit) -> None:
        self._master = master
        self._limit = limit
        self._socket = web.WebSocketResponse(
            autoclose=False, compress=False, max_msg_size=MAX_MESSAGE_BYTES
        )
        self._connection = Connection(next(_numbers), self._give, self.end)
        self._unsent = b""
        self._is_ended = False
        self._changed = asyncio.Event()

    def _give(self, what: Instruction | Problem) -> None:
        self._unsent = _encode(what)
        self._changed.set()

    def end(self) -> None:
        """End the session, after what is not sent yet."""
        self._is_ended = True
        self._changed.set()

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Let the agent speak until one side ends the session."""
        await self._socket.prepare(request)
        sending = asyncio.create_task(self._send())
        try:
            async for message in self._socket:
                if self._is_ended:
                    break
                if message.type is not WSMsgType.BINARY:
                    raise msgspec.DecodeError("it is no binary message")
                await self._on_message(message.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.warning("a session with %s is ended, it sent no message: %s", request.remote, error)
            self._refuse(Problem(str(error)))
        except RefusedError as error:
            self._refuse(Problem(str(error), error.again))
        finally:
            self._master.end_session(self._connection, by_peer=not self._is_ended)
            if not self._is_ended:
                await self._master.written()
            self.end()
            await sending
        return self._socket

    async def _on_message(self, data: bytes) -> None:
        message = _decode(data)
        self._master.num_messages += 1
        if not self._limit.allows(message.incarnation):
            await asyncio.sleep(TOO_MANY_PAUSE)
        self._master.on_message(self._connection, message)

    def _refuse(self, problem: Problem) -> None:
        self._give(problem)
        self.end()

    async def _send(self) -> None:
        """Send the newest instruction whenever there is another one."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            unsent, self._unsent = self._unsent, b""
            try:
                if unsent:
                    await self._socket.send_bytes(unsent)
                elif self._is_ended:
                    await self._socket.close()
                    return
            except ConnectionError:  # the other end has gone, as the reader learns
                return
            if self._is_ended:
                self._changed.set()
