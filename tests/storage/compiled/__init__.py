"""Tests of storage that compile, or that start other processes."""
