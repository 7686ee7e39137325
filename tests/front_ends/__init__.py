"""Tests of the registry, of interoperation with torch.optim, and of TorchOptimizer."""
