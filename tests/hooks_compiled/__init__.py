"""Hooks that run inside compiled code."""
