"""Averaging of parameters that ranks train apart for a while."""
