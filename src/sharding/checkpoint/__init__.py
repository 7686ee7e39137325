"""Sharded state for ``torch.distributed.checkpoint``, and a reader of an older format."""
