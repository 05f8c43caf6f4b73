"""What can be done with a trained policy: exported, looked at, taken in from elsewhere."""
