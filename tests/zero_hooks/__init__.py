"""The hooks of ZeRO under DDP: on real processes, and piece by piece."""
