"""Tests of the ways of running a chain, one file per way."""
