"""The commands of this package: each is an entry point, found by :mod:`command_line`."""
