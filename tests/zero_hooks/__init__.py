"""Tests of ZeRO hooks under DDP: on processes, on threads, and of single parts."""
