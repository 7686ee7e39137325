"""The loops in C++, how libraries are compiled, and where they are kept."""
