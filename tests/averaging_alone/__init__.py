"""Averaging in one process: how what is exchanged is compressed."""
