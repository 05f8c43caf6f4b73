"""What a supervisor must still know after its own death: ``DIR/state.json``.

The newest generation number is written before its plan is published, so that no number is ever
used twice, also not by a supervisor that was killed in between. The plan itself is written with it:
an embedded store dies with its supervisor, and the next one goes on from here.
"""

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from rallypoint.daemon.core.joining import ends_now, joining_refusal
from rallypoint.daemon.core.records import JobRecord, MemberRecord
from rallypoint.daemon.executors.files import write_atomically
from rallypoint.daemon.shared import configload
from rallypoint.daemon.shared.common import common, differences_in_words
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.daemon.shared.plan import Plan
from rallypoint.daemon.shared.rundir import RunDir
from rallypoint.daemon.shared.survey import Survey

SCHEMA: Final = 1
FINISHED: Final = (
    "the job has finished already; raise job.iterations or job.env_steps to train on, or give another "
    "--dir"
)
_GENERATION: Final = re.compile(rb'"generation"\s*:\s*(\d+)')


class PersistedState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``state.json``."""

    schema: int = SCHEMA
    job_name: str
    job: JobRecord
    agreed: dict[str, Any]
    """The values behind ``job.config_hash``, to say what differs."""
    generation: int = 0
    """Newest generation number that may have been published."""
    plans: tuple[Plan, ...] = ()
    """The newest plan that may have been published last, before it those since the formed one."""
    supervisor_incarnation: int = 0
    slot_incarnations: dict[int, int] = {}
    """Newest incarnation that was started in each slot."""


PLANS_KEPT: Final = 4


@dataclass
class StateFile:
    """The state and its file."""

    path: Path
    state: PersistedState

    def update(self, *, durable: bool = True, **changes: Any) -> None:
        """Replace fields and write; nothing is written when nothing changes. Durable: a power cut
        after the call cannot undo it; else only the death of this process cannot."""
        new = msgspec.structs.replace(self.state, **changes)
        if new != self.state:
            data = msgspec.json.format(msgspec.json.encode(new))
            write_atomically(self.path, data, durable=durable)
            self.state = new


def open_state(
    rundir: RunDir,
    config: Config,
    versions: dict[str, str],
    survey: Survey | None,
    *,
    fresh: bool,
) -> StateFile:
    """Read or begin the state of this job, and count this life of the supervisor. ``survey``: what is
    at a checkpoint URL.

    Raises `ConfigError` when ``fresh`` is asked for and the directory holds the job already, when
    the file is damaged, and when it, or what is at the checkpoints' place, belongs to another job or to
    values that workers must share.
    """
    if fresh:
        _refuse_existing(rundir, config, survey)
    state = _read(rundir)
    if state is None:
        hash_ = configload.config_hash(config)
        state = PersistedState(
            job_name=config.job.name,
            job=JobRecord(uid=uuid.uuid4().hex, config_hash=hash_, versions=versions),
            agreed=_plain(configload.agreed(config)),
            generation=_newest_elsewhere(rundir, config, survey),
        )
    else:
        _refuse_other_job(rundir, config, state)
    _refuse_foreign_checkpoints(rundir, config, survey)
    if begins(rundir, config, state):
        source = config.job.warm_start or state.job.warm_start
        state = msgspec.structs.replace(
            state, job=msgspec.structs.replace(state.job, warm_start=source)
        )
    file = StateFile(rundir.state, state)
    try:
        file.update(supervisor_incarnation=state.supervisor_incarnation + 1)
    except OSError as error:
        raise ConfigError(
            f"{rundir.path}: the run's directory cannot be written: {error.strerror}; make room, or "
            "give another one with --dir"
        ) from error
    return file


def begins(rundir: RunDir, config: Config, state: PersistedState | None = None) -> bool:
    """Whether this job has formed nothing yet, as far as its directory tells; ``state`` is what
    ``state.json`` holds, where it has been read. Raises `ConfigError` when that is damaged."""
    known = state or _read(rundir)
    if known is not None and (known.job.formed or known.job.iteration or known.job.checkpoint):
        return False
    return not _manifests(rundir, config)


def with_plan(state: PersistedState, plan: Plan) -> dict[str, Any]:
    """The fields of the state that change before a plan is published."""
    formed, number = formed_plan(state), plan.generation
    # One of the same number or a later one was never published: another leader was faster.
    known = [p for p in state.plans if state.job.formed < p.generation < number]
    kept = [] if formed is None or formed.generation >= number else [formed]
    plans = (*kept, *known[-(PLANS_KEPT - 2) :], plan)
    return {"generation": max(state.generation, number), "plans": plans}


def formed_plan(state: PersistedState) -> Plan | None:
    """The plan of the newest generation marked formed, when it is known."""
    formed = state.job.formed
    return next((p for p in state.plans if formed and p.generation == formed), None)


def plans_to_go_on_from(state: PersistedState, *, alone: bool) -> tuple[Plan, ...]:
    """The newest formed plan, and those after it; () when it is not known. With other nodes only the
    first: a later one may never have been published, and the store has what was."""
    formed = formed_plan(state)
    if formed is None or not alone:
        return () if formed is None else (formed,)
    return tuple(p for p in state.plans if p.generation >= formed.generation)


def trains_in_newest_plan(state: PersistedState) -> bool:
    """Whether the newest plan that may have been published is the newest formed one: nothing of this
    job is under way that only the store could tell."""
    formed = formed_plan(state)
    return formed is not None and state.plans[-1].generation == formed.generation


def resumed(job: JobRecord, versions: dict[str, str], values: dict[str, Any]) -> JobRecord:
    """The job at the start of a supervisor: it runs now, unless an operator has paused it."""
    job = msgspec.structs.replace(job, versions=versions, values=values)
    return (
        job if job.state == "paused" else msgspec.structs.replace(job, state="running", reason="")
    )


def admit(
    state: PersistedState,
    stored: JobRecord,
    *,
    agreed: dict[str, Any],
    others: Sequence[MemberRecord],
    config: Config,
    versions: dict[str, str],
    fresh: bool,
) -> JobRecord:
    """How a job goes on that the membership store holds already. A directory that never saw a plan
    joins it; any other must be of the same one. ``agreed``: the values behind its hash, where they
    are known; ``others``: the other nodes that are in it now.

    Raises `ConfigError` when it is another job, or one whose workers could not train with ours.
    """
    name = config.job.name
    if fresh and (stored.formed or stored.iteration):
        raise ConfigError(
            f"--fresh: the membership store holds job {name!r} at iteration {stored.iteration} already; "
            "leave out --fresh to join it, or give another --job"
        )
    known = state.plans or state.job.formed
    if stored.uid != state.job.uid and known:
        raise ConfigError(
            f"the membership store holds another job {name!r} (uid {stored.uid}) than this directory "
            f"(uid {state.job.uid}); give another --job, or another --dir to join that one"
        )
    if stored.config_hash != state.job.config_hash:
        changes = (
            differences_in_words(agreed, state.agreed) if agreed else "which ones is not known"
        )
        raise ConfigError(
            f"the membership store holds job {name!r} with other values ({changes}; hash "
            f"{stored.config_hash}, here {state.job.config_hash}), and workers must agree on them; give "
            "the same values, or another --job"
        )
    mine = MemberRecord(config.node.name, 0, config.node.advertise, (), versions=versions)
    refusal = joining_refusal(stored, mine, others)
    if refusal:
        raise ConfigError(refusal)
    values = common(config)
    if others and stored.values and stored.values != values:
        names = ", ".join(sorted(member.node for member in others))
        raise ConfigError(
            f"job {name!r} runs with other values ({differences_in_words(stored.values, values)}; nodes: {names}), and "
            "they hold for all of its nodes; give the same ones, or stop the job and start all nodes anew"
        )
    if is_finished(stored, config) or ends_now(stored, others):
        return stored
    return resumed(stored, stored.versions if others else versions, values)


def first_job(state: PersistedState, config: Config, versions: dict[str, str]) -> JobRecord:
    """The job as this life of the supervisor begins it: running, unless it has reached its bounds."""
    if is_finished(state.job, config):
        return state.job
    return resumed(state.job, versions, common(config))


def with_progress(job: JobRecord, iteration: int, env_steps: int) -> JobRecord:
    """The job with its newest committed progress."""
    return msgspec.structs.replace(job, iteration=iteration, env_steps=env_steps)


def is_finished(job: JobRecord, config: Config) -> bool:
    """Whether the job has finished, and the bounds of ``config`` ask for nothing more."""
    iterations, env_steps = config.job.iterations, config.job.env_steps
    return job.state == "finished" and (
        (iterations is not None and job.iteration >= iterations)
        or (env_steps is not None and job.env_steps >= env_steps)
    )


def _read(rundir: RunDir) -> PersistedState | None:
    try:
        data = rundir.state.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{rundir.state}: cannot be read: {error.strerror}") from error
    try:
        state = msgspec.json.decode(data, type=PersistedState)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{rundir.state}: damaged ({error}); nothing was changed. Put back a copy, or move the "
            "file away: generation numbers then go on from the journal and the checkpoints"
        ) from error
    if state.schema != SCHEMA:
        raise ConfigError(
            f"{rundir.state}: schema {state.schema}, but this version reads {SCHEMA}; resume with "
            "the version that wrote it, or give another --dir"
        )
    return state


def _refuse_existing(rundir: RunDir, config: Config, survey: Survey | None) -> None:
    manifests = _manifests(rundir, config)
    held = [str(path) for path in (rundir.state, *manifests[:1]) if path.exists()]
    held += [survey.holds] if survey is not None and survey.holds else []
    if held:
        raise ConfigError(
            f"--fresh: {rundir.path} already holds job {config.job.name!r} ({held[0]} exists); leave "
            "out --fresh to resume it, or give another --dir and checkpoint.url"
        )


class _Owner(msgspec.Struct):
    """The one thing of a manifest that matters here."""

    job: str


def _refuse_foreign_checkpoints(rundir: RunDir, config: Config, survey: Survey | None) -> None:
    """One place, one job: what is of another one would neither be restored nor let ours be committed. Not
    where there are some of ours too: somebody copied the others there, and no start is to fail for that."""
    owners = {} if survey is None else {job: str(survey.holds) for job in survey.jobs}
    for path in _manifests(rundir, config):
        try:
            job = msgspec.json.decode(path.read_bytes(), type=_Owner).job
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            continue  # damaged: whoever restores says so
        owners[job] = str(path.parent)
    if owners and config.job.name not in owners:
        job, where = next(iter(owners.items()))
        raise ConfigError(
            f"{where} is a checkpoint of job {job!r}, not of job.name = {config.job.name!r}; give every "
            f"job its own checkpoint.url and --dir, or move it away. To begin with its policy: "
            f"--warm-start {where}"
        )


def _refuse_other_job(rundir: RunDir, config: Config, state: PersistedState) -> None:
    if state.job_name != config.job.name:
        raise ConfigError(
            f"{rundir.path} holds job {state.job_name!r}, not job.name = {config.job.name!r}; give "
            f"another --dir, or --job {state.job_name}"
        )
    new = _plain(configload.agreed(config))
    if state.job.config_hash == configload.config_hash(config):
        return
    raise ConfigError(
        f"{rundir.path} holds job {state.job_name!r} with other values "
        f"({differences_in_words(state.agreed, new)}), and workers must agree on them; set them back, or start anew "
        "in another --dir"
    )


def _newest_elsewhere(rundir: RunDir, config: Config, survey: Survey | None) -> int:
    """Newest generation that the journal or a manifest mentions, when ``state.json`` is gone."""
    found = [0 if survey is None else survey.generation]
    for path in (rundir.journal, *_manifests(rundir, config)):
        if path.is_file():
            found += [int(number) for number in _GENERATION.findall(path.read_bytes())]
    return max(found)


def _manifests(rundir: RunDir, config: Config) -> list[Path]:
    folders = {rundir.checkpoints(config), rundir.path / "checkpoints"}  # both may be in use
    return sorted(path for folder in folders for path in folder.glob("*/manifest.json"))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """The values as JSON gives them back."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(values))
    return plain
