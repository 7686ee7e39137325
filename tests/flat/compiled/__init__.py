"""Flat buffers where loops are compiled: those that look at tensors, and those that step."""
