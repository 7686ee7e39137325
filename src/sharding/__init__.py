"""The sharding planner: which rank owns which parameter. Between the core and the hooks."""
