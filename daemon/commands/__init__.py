"""Subcommands of ``rallypoint`` that need nothing but the daemon."""
