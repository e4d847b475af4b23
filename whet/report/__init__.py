"""Records -> terminal tables, JSON, and the tables of README and docs. Only this package formats."""
