"""The classes that torch has, or would have, over the same chains."""
