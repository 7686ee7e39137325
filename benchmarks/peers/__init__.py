"""Peers for optimizers that torch.optim lacks: classes in the usual style, and a loop in C."""
