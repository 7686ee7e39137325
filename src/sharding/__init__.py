"""The sharding planner: which rank owns which parameter. It stands between the core and the hooks."""
