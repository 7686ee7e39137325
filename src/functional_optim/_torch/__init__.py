"""All uses of torch's private names. No other folder uses private names of torch.

For each name, a docstring says why it is needed, and what happens if a torch version lacks it:
public names are used instead, or an ImportError is raised before anything is written. The error
says what is missing and what to do. Tests notice if torch changes one of these names.

Modules that are slow to import are imported by the functions that need them.
"""
