"""Alert rules for Prometheus, their unit tests, and examples: files, no code. See ``docs/alerts/README.md``."""
