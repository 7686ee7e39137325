"""Faults that strangers to the hooks may meet: lifetimes, schedulers, scalers, defaults."""
