"""Bytes that this process has sent over TCP, as the kernel counts them."""

import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Offsets in struct tcp_info of <linux/tcp.h>, each a __u64.
BYTES_ACKED = 120
BYTES_SENT = 200  # since Linux 4.19
BYTES_RETRANS = 208


def sent() -> dict[int, int]:
    """By each open connection's inode; what was sent again for being lost is not counted."""
    return dict(_connections(_sent))


def since(before: dict[int, int]) -> int:
    """Sent by the connections that are open now; one that was closed meanwhile takes none away."""
    return sum(count - before.get(inode, 0) for inode, count in sent().items())


def uncounted() -> str | None:
    """Return why this machine's kernel cannot count sent bytes; None if a trial succeeds."""
    if sys.platform != "linux":
        return f"TCP_INFO is read as Linux gives it, and this is {sys.platform}"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        before = _sent(one)
        one.sendall(bytes(1000))
        other.recv(1000, socket.MSG_WAITALL)
        # An acknowledgement comes with the answer, where that is what is counted.
        other.sendall(b"!")
        one.recv(1)
        counted = _sent(one) - before
    return None if counted == 1000 else f"the kernel counts {counted} bytes where 1000 were sent"


def _sent(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) >= BYTES_RETRANS + 8:
        return _number(info, BYTES_SENT) - _number(info, BYTES_RETRANS)
    return _number(info, BYTES_ACKED) if len(info) >= BYTES_ACKED + 8 else 0


def _number(info: bytes, offset: int) -> int:
    value: int = struct.unpack_from("=Q", info, offset)[0]
    return value


def _connections(of: Callable[[socket.socket], int]) -> Iterator[tuple[int, int]]:
    """Inode and ``of`` of this process's TCP sockets, each once."""
    seen: set[int] = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            descriptor = os.dup(int(entry.name))
        except OSError:  # closed meanwhile: the listing's own, for one
            continue
        status = os.fstat(descriptor)
        if not stat.S_ISSOCK(status.st_mode) or status.st_ino in seen:
            os.close(descriptor)
            continue
        seen.add(status.st_ino)
        with socket.socket(fileno=descriptor) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                yield status.st_ino, of(one)
