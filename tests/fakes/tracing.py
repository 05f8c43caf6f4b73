"""Whether this machine lets one process read the memory of another of the same user."""

import os
from pathlib import Path

_CAP_SYS_PTRACE = 1 << 19


def ptrace_permitted() -> bool:
    """Not under Yama's restriction, or with the capability that lifts it."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if not scope.exists() or scope.read_text().strip() == "0":
        return True
    status = Path(f"/proc/{os.getpid()}/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    return bool(effective & _CAP_SYS_PTRACE)
