"""The documentation: its pages, and the program that generates some of them from the code."""
