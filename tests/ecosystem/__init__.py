"""Tests, offline, of our optimizers in libraries that train with a torch.optim.Optimizer."""
