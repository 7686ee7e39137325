"""Commands of this package. Each is an entry point that :mod:`command_line` loads."""
