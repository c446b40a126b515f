"""Tools for maintainers: publish a run, write cards and tables, measure costs."""
