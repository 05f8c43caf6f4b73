"""Whether a node may take part in a job: what it has other than the job is named."""

from collections.abc import Sequence
from typing import Final

from rallypoint.daemon.core.records import JobRecord, MemberRecord

COMPARED_VERSIONS: Final = ("rallypoint", "torch", "nccl")
"""Versions that members of one generation must share."""


def joining_refusal(job: JobRecord, mine: MemberRecord, others: Sequence[MemberRecord]) -> str:
    """Why this node may not take part in the job, with every difference; "" when it may.

    ``others`` are the members that live: while there is none, versions may change, since nobody is
    left to disagree with.
    """
    found = differences(job, mine, versions=any(m.node != mine.node for m in others))
    if not found:
        return ""
    return (
        f"node {mine.node!r} cannot join the job: {'; '.join(found)}. Give every node the same "
        "configuration and the same versions, or another job.name"
    )


def ends_now(job: JobRecord, others: Sequence[MemberRecord]) -> bool:
    """Whether the job has ended, and ``others`` are still leaving it: a supervisor that is restarted at that
    moment ends with it. Where nobody is left, a start begins the job again."""
    return bool(others) and job.state in ("finished", "failed")


def differences(job: JobRecord, member: MemberRecord, *, versions: bool = True) -> list[str]:
    """What a member has other than the job; a value that it does not know is no difference."""
    found = []
    for name, here, there in (
        ("job uid", member.job_uid, job.uid),
        ("configuration hash", member.config_hash, job.config_hash),
    ):
        if here and there and here != there:
            found.append(f"{name} {here} here, {there} in the job")
    for name in COMPARED_VERSIONS if versions else ():
        here, there = member.versions.get(name, ""), job.versions.get(name, "")
        if here and there and here != there:
            found.append(f"{name} {here} here, {there} in the job")
    return found
