"""The laws of executors that compile."""
