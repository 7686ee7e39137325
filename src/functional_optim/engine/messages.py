"""Values and names in error messages, and missing packages."""

from functional_optim.core.format import format_names, format_value
from functional_optim.core.packages import require_package
