"""Simulator backends behind one Protocol."""
