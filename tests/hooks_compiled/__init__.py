"""Hooks that run inside of compiled code."""
