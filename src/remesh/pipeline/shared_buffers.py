"""Message buffers that other processes of the machine see.

A message between processes of one machine need not go through a socket: the sender packs it into
memory that both have mapped, and the receiver copies out of it. The memory is an unnamed file, so
nothing is left behind however the processes end, and what a process has mapped stays readable when
the other one is dead.

Another process opens the file by way of `/proc`, once, and reads it only. Whether it may, and
whether it is on the same machine at all, depends on users, containers and namespaces. Nothing is
concluded from any of these: the file begins with a random token, and a process that does not find
it there gets messages through the network.
"""

from __future__ import annotations

import functools
import mmap
import os
import secrets
import stat
from pathlib import Path

import msgspec
import numpy as np

from remesh.storage import Buffer, map_memory, touch

_TOKEN_BYTES = 16


class Offer(msgspec.Struct, frozen=True):
    """Where other processes find a file in memory."""

    machine: str = ""
    """Names the kernel and the namespace in which `process` is a number; empty if there is no file.
    """
    process: int = 0  # the process that has it open
    descriptor: int = 0  # its descriptor there
    num_bytes: int = 0  # its size
    token: bytes = b""  # what it begins with


class SharedBuffers:
    """Some buffers of one size that other processes may map.

    Attributes:
        buffers: The memory.
        offer: Where others find it, until `close`.

    Raises:
        MemoryError: If the system refuses the memory.
    """

    def __init__(self, num_buffers: int, num_bytes: int) -> None:
        self.offer = Offer()
        size = mmap.PAGESIZE + num_buffers * num_bytes
        self._file = _memory_file(size)
        memory = map_memory(size, self._file)
        touch(memory)
        self.buffers = _cut(memory, num_buffers, num_bytes)
        if self._file is not None:
            token = secrets.token_bytes(_TOKEN_BYTES)
            memory[:_TOKEN_BYTES] = np.frombuffer(token, np.uint8)
            self.offer = Offer(machine(), os.getpid(), self._file, size, token)

    def close(self) -> None:
        """Let no further process map the buffers; those that have keep them."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def map_buffers(offer: Offer, num_buffers: int, num_bytes: int) -> list[Buffer] | None:
    """The buffers of another process, to read only; None if they are out of reach."""
    if not offer.machine or offer.machine != machine():
        return None
    if offer.num_bytes != mmap.PAGESIZE + num_buffers * num_bytes:
        return None
    try:
        # What this opens may be anything, if it is not what was offered: it must not block.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        file = os.open(f"/proc/{offer.process}/fd/{offer.descriptor}", flags)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != offer.num_bytes:
            return None
        mapped = mmap.mmap(file, offer.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError:
        return None
    finally:
        os.close(file)
    memory = np.frombuffer(mapped, np.uint8)
    if memory[:_TOKEN_BYTES].tobytes() != offer.token:
        return None
    return _cut(memory, num_buffers, num_bytes)


def _cut(memory: Buffer, num_buffers: int, num_bytes: int) -> list[Buffer]:
    starts = (mmap.PAGESIZE + number * num_bytes for number in range(num_buffers))
    return [memory[start : start + num_bytes] for start in starts]


def _memory_file(num_bytes: int) -> int | None:
    """A new file in memory; None if the system has none, or no room for it."""
    if not machine():
        return None
    try:
        file = os.memfd_create("remesh-messages", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        return None
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError:
        os.close(file)
        return None
    return file


@functools.cache
def machine() -> str:
    """A name of the running kernel and of this process's namespace of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
