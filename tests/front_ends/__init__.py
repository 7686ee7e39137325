"""Registry, torch.optim interop and TorchOptimizer, as the people who come from torch use them."""
