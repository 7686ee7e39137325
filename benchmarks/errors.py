"""Why a contestant does not take part."""


class Absent(Exception):  # noqa: N818  it is a fact about the world, not a fault
    """What does not exist here; the text says why."""
