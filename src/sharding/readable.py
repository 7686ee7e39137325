"""Texts that others wrote, as they may be shown on a terminal."""

CUT = " ..."


def readable(text: str, most: int = 2000) -> str:
    r"""A text whose control characters are spelled out, and that ends.

    A terminal obeys some of them: it would change its title or colours, write over earlier lines,
    or show letters in another order.

    Args:
        text: any; its line breaks stay.
        most: characters that are shown.

    Example::

        >>> print(readable("layer\x1b[31m.weight"))
        layer\x1b[31m.weight
    """
    whole = "".join(
        one if one.isprintable() or one == "\n" else _spelled(one) for one in text[:most]
    )
    return whole if len(text) <= most else whole + CUT


def readable_name(name: str) -> str:
    """A name in one line of a sensible length."""
    return readable(name, 200).replace("\n", "\\n")


def _spelled(one: str) -> str:
    return one.encode("unicode_escape").decode("ascii")
