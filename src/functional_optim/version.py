"""The version of the installed package, from its metadata."""

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Return the version, or "0+unknown" if the package is not installed."""
    try:
        return version("functional-optim")
    except PackageNotFoundError:
        return "0+unknown"
