"""Ranks over NCCL. Several may share one device: each says that it is another host."""
