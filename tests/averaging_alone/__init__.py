"""Model averaging on ranks that are threads of one process, and compression."""
