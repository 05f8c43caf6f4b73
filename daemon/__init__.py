"""The supervisor: one per node. Nothing in this package imports torch."""
