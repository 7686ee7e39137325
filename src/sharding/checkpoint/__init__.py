"""State in the format of ``torch.distributed.checkpoint``: ranges of elements of a tensor."""
