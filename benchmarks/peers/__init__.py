"""Peers to compare with where torch.optim has none: usual classes, and a loop in C."""
