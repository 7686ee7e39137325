"""Values and names in error messages, and missing packages."""

from functional_optim.core.format import format_names, format_value
from functional_optim.core.packages import require_package

__all__ = ["format_names", "format_value", "require_package"]
