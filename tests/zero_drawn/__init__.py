"""The hooks of ZeRO under DDP on real processes, over cases that hypothesis draws."""
