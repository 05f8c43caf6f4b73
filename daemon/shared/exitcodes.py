"""Exit codes of worker processes; 0 is leaving by agreement."""

from typing import Final

EXIT_FAULT: Final = 70
"""An exception of the program."""
EXIT_RESTART_COLD: Final = 71
"""This process must not go on with what it holds: its slot restarts cold."""
EXIT_ABANDONED: Final = 72
"""Without supervisor while stuck."""
EXIT_OUT_OF_MEMORY: Final = 73
"""Of the host or of the device."""
