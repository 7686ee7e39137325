"""Tests of storage: how parameters and state are kept between steps."""
