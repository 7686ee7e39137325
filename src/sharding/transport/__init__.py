"""Transfer of gradients and parameters between ranks: one interface, one class per backend."""

from sharding.transport.choice import make_transport
from sharding.transport.gloo import GlooTransport
from sharding.transport.groups import gather_group
from sharding.transport.nccl import NcclTransport
from sharding.transport.protocol import Range, Transport, TransportError, Work
from sharding.transport.shared_memory import SharedMemoryTransport

__all__ = [
    "GlooTransport",
    "NcclTransport",
    "Range",
    "SharedMemoryTransport",
    "Transport",
    "TransportError",
    "Work",
    "gather_group",
    "make_transport",
]
