"""Averaging for special cases: gossip, PowerSGD with checkpoints, and 2 bits per element."""

from hooks.averaging.contrib.gossip import GossipModelAverager
from hooks.averaging.contrib.power_sgd import PowerSGDMemory, power_sgd_hook
from hooks.averaging.contrib.statistical import Statistical

__all__ = ["GossipModelAverager", "PowerSGDMemory", "Statistical", "power_sgd_hook"]
