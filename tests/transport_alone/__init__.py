"""Tests of the transport in one process: buffers, sums, shared memory, and the choice of one."""
