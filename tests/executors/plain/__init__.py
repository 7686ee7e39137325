"""Tests of executors that compile nothing."""
