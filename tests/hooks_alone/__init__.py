"""Hooks in one process: what they account for, what they step, and what they refuse."""
