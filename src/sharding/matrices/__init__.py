"""Rules for whole matrices under FSDP2: each sharded matrix is stepped by one rank."""
