"""Tests of the demo on the ranks that all tests share."""
