"""Tests of parameters that live in flat buffers."""
