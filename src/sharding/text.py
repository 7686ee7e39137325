"""Text for terminals: untrusted text with escaped control characters, and sizes with units."""


def escape_text(text: str, most: int = 2000) -> str:
    r"""Return a text with escaped control characters and limited length. Line breaks are kept.

    A terminal obeys control characters: they can change its title or colours, overwrite earlier
    lines, or reorder letters.

    Example::

        >>> print(escape_text("layer\x1b[31m.weight"))
        layer\x1b[31m.weight
    """
    escaped = "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode("ascii")
        for one in text[:most]
    )
    return escaped if len(text) <= most else escaped + " ..."


def escape_name(name: str) -> str:
    """Return a name in one line of at most about 200 characters."""
    return escape_text(name, 200).replace("\n", "\\n")


def format_flops(count: int) -> str:
    """Return a number of floating-point operations with a unit."""
    return _format(count, 1000, [f"{prefix}FLOP" for prefix in ("", "k", "M", "G", "T", "P")])


def format_bytes(count: int) -> str:
    """Return a number of bytes with a unit."""
    return _format(count, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"])


def _format(count: int, base: int, units: list[str]) -> str:
    number, unit = float(count), 0
    while number >= 1000 and unit + 1 < len(units):
        number, unit = number / base, unit + 1
    return f"{count} {units[0]}" if unit == 0 else f"{number:.2f} {units[unit]}"
