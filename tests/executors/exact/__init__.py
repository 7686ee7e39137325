"""Tests of exact loops."""
