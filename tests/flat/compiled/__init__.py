"""Flat buffers with compiled loops: loops that look at tensors, and loops that step."""
