"""The hooks that step a ZeroRedundancyOptimizer while DDP's backward pass goes on."""
