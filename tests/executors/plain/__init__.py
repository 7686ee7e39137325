"""Laws of executors, by those that compile nothing."""
