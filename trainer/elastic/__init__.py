"""The elastic session: process group rebuilds, state sync, commit protocol."""
