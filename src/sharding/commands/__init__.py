"""The commands of this package: each is an entry point, found by the core's command line."""
