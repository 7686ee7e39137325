"""Error for a contestant that cannot take part."""


class Absent(Exception):  # noqa: N818  it is a fact about the world, not a fault
    """Error for a contestant that does not exist here; the text says why."""
