"""Hooks in one process: their accounts, their steps, and their refusals."""
