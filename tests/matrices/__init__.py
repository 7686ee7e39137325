"""Tests of whole matrices under FSDP2, each stepped by its owner."""
