"""Tests of DTensor parameters with one rank, in this process."""
