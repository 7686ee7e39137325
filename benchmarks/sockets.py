"""Bytes that this process has sent over TCP, as the kernel counts them."""

import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Offsets in struct tcp_info of <linux/tcp.h>. Each field is a __u64.
BYTES_ACKED = 120
BYTES_SENT = 200  # since Linux 4.19
BYTES_RETRANS = 208


def sent() -> dict[int, int]:
    """Return the sent bytes of each open connection, by inode, without retransmitted bytes."""
    return dict(_connections(_sent))


def since(before: dict[int, int]) -> int:
    """Return the bytes sent since ``before`` by the open connections; closed ones do not count."""
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
        # Older kernels count acknowledged bytes. The answer brings the acknowledgement.
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
    """Yield the inode and the value of ``of`` for each TCP socket of this process, once."""
    seen: set[int] = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            descriptor = os.dup(int(entry.name))
        except OSError:  # closed meanwhile, such as the descriptor of the listing
            continue
        status = os.fstat(descriptor)
        if not stat.S_ISSOCK(status.st_mode) or status.st_ino in seen:
            os.close(descriptor)
            continue
        seen.add(status.st_ino)
        with socket.socket(fileno=descriptor) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                yield status.st_ino, of(one)
