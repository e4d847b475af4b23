"""Records formatted: terminal tables, HTML pages, pictures, and the tables of README and docs. Only this package formats."""
