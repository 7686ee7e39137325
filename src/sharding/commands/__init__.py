"""Commands of this package. Each is an entry point for the core's command line."""
