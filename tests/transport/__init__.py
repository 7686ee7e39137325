"""Tests of the transport on several processes over gloo."""
