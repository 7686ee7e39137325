"""Tests of the pages of the documentation."""
