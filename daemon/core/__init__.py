"""Pure decisions: membership, planning, worker lifecycle. No I/O, clock, randomness or logging."""
