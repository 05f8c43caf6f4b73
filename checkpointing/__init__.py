"""Checkpoints: snapshot, commit, verification, retention, restore."""
