"""An agent's session with the master: one WebSocket, which a thread keeps open.

The thread sends heartbeats, so that the node is alive for the master while the launcher waits,
starts processes, or is busy otherwise, and takes the newest instruction. Messages that still hold
are sent again in each new session: the old one may have broken before the master had them. While
there is no session (the master may be restarting) the thread tries to begin one; `wait` gives up
after its patience.

No session that breaks ends the thread, or the node would be lost while it works.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import aiohttp
import msgspec

from remesh.elastic.client import BUSY, HINT, LOG_EVERY, PAUSE, Client, no_answer, not_trusted
from remesh.elastic.protocol import Beat, Instruction, Message, Problem
from remesh.errors import MasterError

log = logging.getLogger(__name__)

CONNECT_SECONDS = 15.0
"""Seconds in which a session must begin."""
PING_SECONDS = 30.0
"""A master that has not reacted for so long is gone, even if the connection looks open."""
CLOSE_SECONDS = 10.0
"""How long the master has to write what it was told last, before the session ends without that."""
TLS_SECONDS = 0.1
"""A connection below TLS is closed a little later than aiohttp says."""
MAX_INSTRUCTION_BYTES = 64 << 20

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Instruction | Problem).decode


class Session:
    """The session of an agent.

    `beat` makes the next heartbeat, or None as long as the node has no id; `pause` returns the
    seconds, at most, until the one after it.
    """

    def __init__(
        self, client: Client, beat: Callable[[], Beat | None], pause: Callable[[], float]
    ) -> None:
        self._client = client
        self._beat = beat
        self._pause = pause
        self._changed = threading.Condition()
        self.newest: Instruction | None = None
        self._is_new = True  # the session has brought no instruction yet
        self._standing: dict[type, bytes] = {}
        self._unsent: list[bytes] = []
        self._problem, self._is_final = "", False  # why there is no session
        self._down_since: float | None = time.monotonic()
        self._logged_at: float | None = None
        self._ends: float | None = None  # when to give up to end well
        self._is_acknowledged = False
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="remesh-session", daemon=True)
        self._thread.start()

    @property
    def silence(self) -> float:
        """Seconds since the last session has ended; 0 while there is one."""
        since = self._down_since
        return 0.0 if since is None else time.monotonic() - since

    def say(self, message: Message) -> None:
        """Send a message, which later sessions repeat until it is forgotten.

        Raises:
            MasterError: If it has text that cannot be sent.
        """
        try:
            data = _encode(message)
        except UnicodeEncodeError as error:
            raise MasterError(f"{type(message).__name__} cannot be sent: {error}") from error
        with self._changed:
            self._standing[type(message)] = data
            self._unsent.append(data)
        self.hurry()

    def forget(self, *, but: type | None = None) -> None:
        """Let no earlier message hold any longer, but those of one type."""
        with self._changed:
            self._standing = {kind: one for kind, one in self._standing.items() if kind is but}

    def hurry(self) -> None:
        """Send what is there, and the next heartbeat, at once."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake.set)

    def wait(self, answer: Callable[[Instruction], T | None], patience: float) -> T:
        """Wait for an instruction of which something follows.

        Raises:
            MasterError: If the master refuses the agent, or there is no session for too long.
        """
        began = time.monotonic()
        with self._changed:
            while True:
                if self.newest is not None and (found := answer(self.newest)) is not None:
                    return found
                left = None
                if self._down_since is not None:
                    if self._is_final:
                        raise MasterError(self._problem)
                    left = max(self._down_since, began) + patience - time.monotonic()
                    if left <= 0 and self._problem:
                        raise MasterError(self._problem + HINT)
                self._changed.wait(max(left, 0.0) if left is not None and self._problem else None)

    def end(self, seconds: float) -> bool:
        """End the session; True if the master has written what it was told.

        While there is no session, one is begun for so many seconds.
        """
        with self._changed:
            self._ends = time.monotonic() + seconds
        self.hurry()
        self._thread.join()
        return self._is_acknowledged

    # In the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._keep())
        except Exception as error:  # raised to those who wait
            log.exception("the session with the master is lost")
            self._note_end(f"the session with the master is lost: {error!r}", is_final=True)
        finally:
            self._loop.close()

    async def _keep(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while True:
                await self._try_once(http)
                if self._is_acknowledged or (
                    self._ends is not None and time.monotonic() >= self._ends
                ):
                    break
                if not self._client.has_moved():
                    self._wake.clear()  # the end of the session has set it
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(PAUSE):
                            await self._wake.wait()
        if self._client.tls is not None:
            await asyncio.sleep(TLS_SECONDS)

    async def _try_once(self, http: aiohttp.ClientSession) -> None:
        """Begin a session, and keep it until it ends."""
        url, is_final = self._client.url, False
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                wire = await self._connect(http)
        except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError) as error:
            problem, is_final = not_trusted(url, error), True
        except aiohttp.WSServerHandshakeError as error:
            # The reason is in the body of the reply, which aiohttp does not give.
            problem = await asyncio.to_thread(self._client.refusal, "session")
            problem = problem.removesuffix(HINT)  # `wait` gives it
            is_final = error.status not in BUSY
        except (aiohttp.ClientError, OSError) as error:
            problem = no_answer(url, error)
        else:
            problem, is_final = await self._speak(wire)
        self._note_end(problem, is_final=is_final)

    async def _connect(self, http: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        wire = await http.ws_connect(
            self._client.url_of("session"),
            headers=self._client.authorization,
            ssl=self._client.tls or True,
            heartbeat=PING_SECONDS,
            max_msg_size=MAX_INSTRUCTION_BYTES,
            timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS),
        )
        raw = wire.get_extra_info("socket")
        if raw is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            # A connection that takes no heartbeats any more must not outlast the next ones.
            limit = int(2000 * self._pause())
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
        return wire

    async def _speak(self, wire: aiohttp.ClientWebSocketResponse) -> tuple[str, bool]:
        """Send and receive until the session ends; its problem, and whether that is final."""
        url = self._client.url
        problem = f"the master at {url} has ended the session"
        self._is_new = True
        receiving = asyncio.create_task(self._receive(wire))
        with self._changed:
            standing = list(self._standing.values())
            others = [one for one in self._unsent if all(one is not held for held in standing)]
            self._unsent = [*standing, *others]
        try:
            while not receiving.done():
                self._wake.clear()
                # Asked before what is said is taken: what is said comes before the end.
                is_last = self._ends is not None
                await self._send_all(wire)
                if is_last:
                    await wire.close()
                    self._is_acknowledged = wire.close_code == aiohttp.WSCloseCode.OK
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause()):
                        await self._wake.wait()
        except (aiohttp.ClientError, OSError) as error:
            problem = no_answer(url, error)
        finally:
            await wire.close()
            refused = (await asyncio.gather(receiving, return_exceptions=True))[0]
        if isinstance(refused, Problem):
            return f"{url}: {refused.error}", not refused.again
        if isinstance(refused, BaseException):
            return f"the session with the master at {url} has broken: {refused}", False
        return problem, False

    async def _send_all(self, wire: aiohttp.ClientWebSocketResponse) -> None:
        with self._changed:
            unsent, self._unsent = self._unsent, []
        beat = self._beat()
        for data in unsent if beat is None else [*unsent, _encode(beat)]:
            await wire.send_bytes(data)

    async def _receive(self, wire: aiohttp.ClientWebSocketResponse) -> Problem | None:
        """Take what the master shows, until the session ends; why it refuses the agent."""
        try:
            async for message in wire:
                if message.type is aiohttp.WSMsgType.ERROR:
                    raise message.data
                if message.type is not aiohttp.WSMsgType.BINARY:
                    continue
                found = _decode(message.data)
                if isinstance(found, Problem):
                    return found
                self._take(found)
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            text = f"what the master says is not of a master of this version: {error}"
            return Problem(text)
        finally:
            self._wake.set()

    def _take(self, instruction: Instruction) -> None:
        if self._logged_at is not None:
            log.warning("the master answers again, after %.0f s", self.silence)
            self._logged_at = None
        with self._changed:
            self._down_since = None
            # Another master may count from a lower number on.
            is_first, self._is_new = self._is_new, False
            if is_first or self.newest is None or instruction.number > self.newest.number:
                self.newest = instruction
            self._changed.notify_all()

    def _note_end(self, problem: str, *, is_final: bool) -> None:
        now = time.monotonic()
        if self._ends is None and (self._logged_at is None or now - self._logged_at >= LOG_EVERY):
            self._logged_at = now
            log.warning("%s; trying again", problem)
        with self._changed:
            self._problem, self._is_final = problem, is_final
            if self._down_since is None:
                self._down_since = now
            self._changed.notify_all()
