"""The transport: on real processes over gloo, and piece by piece."""
