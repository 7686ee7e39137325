"""Tests of ZeRO hooks under DDP on real processes, over cases that hypothesis draws."""
