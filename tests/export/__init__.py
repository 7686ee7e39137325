"""Tests of export_step: programs that run without this package."""
