"""Adapters to simulators that hold a fixed number of envs, made anew to hold another."""
