"""Tests of the loops in C++, of their compilation, and of the cache of libraries."""
