"""Reference pages made from the code: ``python -m rallypoint.ops.docs`` rewrites them.

``docs/metrics.md`` comes from the table of metrics, ``docs/configuration.md`` from the configuration's
dataclasses and the strings under their fields, ``docs/log-events.md`` from the list of events and the places
that log them. A test refuses pages that differ from the code.
"""

import ast
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, Final

from rallypoint.daemon.executors import logevents, metrics, metrictable
from rallypoint.daemon.shared import configload, timeouts
from rallypoint.daemon.shared.config import Config
from rallypoint.daemon.shared.figures import FIGURES
from rallypoint.daemon.shared.profiles import PROFILES
from rallypoint.daemon.shared.tasks import TASK_OVERRIDES
from rallypoint.ops import logsites

FOLDER: Final = Path(__file__).resolve().parents[1] / "docs"
_NOTE: Final = (
    "<!-- Written by `python -m rallypoint.ops.docs`; change the code, not this page. -->"
)
_ACCESS: Final = """
    ## Who may read them

    `metrics.bind` is this machine alone. To let Prometheus in from elsewhere, set it, and protect it:

    ```toml
    [metrics]
    bind = "10.0.0.7"
    cert_file = "/etc/rallypoint/metrics.pem"
    key_file = "/run/credentials/rallypoint@JOB.service/rallypoint_metrics-key.pem"
    users_file = "/etc/rallypoint/metrics.users" # htpasswd -nBC 10 prometheus
    # client_ca_file = "/etc/rallypoint/prometheus-ca.pem" # and a client certificate, for every path
    ```

    `users_file` has a line `NAME:HASH` for each user, with a bcrypt hash of cost 4 to 14. Only /metrics asks for
    a user; /readyz tells its reason to users alone. All files are read again when they change; one that
    cannot be used is refused at the start (exit code 2), and later leaves in force what was read before (log
    event `metrics_files_not_reloaded`). A client has 10 s for its request and its answer, at most 8 KiB
    to ask, and there are 64 places: the oldest client goes, so idle and slow ones block nobody.
    """
_SECONDS: Final = """
    ## Env steps and seconds

    Env steps are accounted for once: `rallypoint_env_steps_total` counts what entered a committed
    iteration, `rallypoint_env_steps_lost_total` what was collected and did not (`died`: with its process;
    `dropped`: a worker took another's state, or left; `cut`: no part of the present algorithm cuts, so
    it stays 0).

    Every second of every slot is in exactly one activity of `rallypoint_wall_seconds_total`, from the start of
    the supervisor on: rates over all activities add up to `rallypoint_slots`. A slot without a worker is in
    warm_up before its first, in recovery (phase restart) after a loss, in drain after it left, in idle
    while it is in quarantine. A wait for a peer that proves to be gone is recovery (phase detect) from
    where it began. What an update that is rolled back took stays in its activity, and is badput by cause
    redone. So

    ```
    goodput = 1 - sum(rate(rallypoint_badput_seconds_total[10m])) / sum(rate(rallypoint_wall_seconds_total[10m]))
    ```

    and `sum by (cause) (rate(rallypoint_badput_seconds_total[10m]))` is what was lost, in workers, and why.
    """

_JOURNAL: Final = """
`worker` is `node/slot#incarnation`. Names of fields are the same in journald, in capitals behind `RALLYPOINT_`;
`MESSAGE` is the event and its own fields, `PRIORITY` the level:

```
journalctl -t rallypoint RALLYPOINT_JOB=walk RALLYPOINT_EVENT=worker_exited -o verbose
```

What workers print is no part of this log: see [Logs](logs.md).
"""


def pages() -> dict[str, str]:
    """Name of each page, and its text as the code says it now."""
    return {
        "metrics.md": metrics_page(),
        "configuration.md": configuration_page(),
        "curves.md": curves_page(),
        "log-events.md": log_events_page(),
    }


def metrics_page() -> str:
    """Every metric of the supervisor's table."""
    rows = [
        (
            f"`rallypoint_{spec.name}`",
            spec.kind,
            "<br>".join(
                f"{name}: {', '.join(values)}" if values else name
                for name, values in spec.labels.items()
            ),
            spec.scope,
            spec.help,
        )
        for spec in metrictable.TABLE
    ]
    figures = [(f"`{metrics.train_name(f.name)}`", f.scope, f.meaning) for f in FIGURES]
    return _page(
        "Metrics",
        """
        The supervisor serves Prometheus text at `/metrics` (`rallypoint status` shows the address), `/healthz`
        (200 while it lives) and `/readyz` (200 while the job runs, else 503 with the reason). Workers report to
        the supervisor, so a dead worker leaves no series behind; counters add up over all lives of workers.
        Every label value exists from the start, but for those that are named here without values. Units
        are in the names.

        *Scope* says what a value speaks of. `agreed`, `global sum` and `global mean` (weighted by count) are
        of the whole job, of all ranks, and the same whichever node is asked: take their maximum over nodes,
        not their sum. `worker`: one worker of this node. `supervisor`: this node, to be added up over nodes.
        """,
        _table(("metric", "kind", "labels", "scope", "meaning"), rows),
        """
        The client library's `process_…` metrics are about the supervisor's own process.

        ## Figures of the trainer

        Gauges of the newest committed iteration, under the tags of [the curves](curves.md) with every other
        character as `_` and units written out: global sums or means over all ranks, never one rank's view. One that nothing was
        counted for (no episode ended) has no series then. A task adds `rallypoint_train_env_<figure>` and
        `rallypoint_train_episode_rew_<term>`.
        """,
        _table(("metric", "scope", "meaning"), figures),
        _ACCESS,
        _SECONDS,
    )


def curves_page() -> str:
    """Tags of the curves, and how they are written."""
    rows = [(f"`{f.tag}`", f"`{f.name}`", f.meaning) for f in FIGURES]
    own = (
        ("`fps`", "env steps of the iteration, of all ranks, over its wall time"),
        ("`tot_timesteps`", "env steps up to here"),
        ("`tot_time`", "wall time of all iterations up to here, in seconds"),
        ("`generation`, `world_size`", "of the iteration"),
        ("`samples`", "env steps that entered the iteration: the effective batch"),
    )
    return _page(
        "Curves",
        """
        `rallypoint run` writes TensorBoard event files into `DIR/curves` (`curves.directory`); look at them
        with `tensorboard --logdir DIR/curves`. The step is the iteration. Every committed iteration is one
        point: none is missing and none is there twice, whatever was killed. The journal is the truth: the
        supervisor of the node that had rank 0 in an iteration writes its point, and whoever begins to write
        first cuts what a restore has wound back and adds what is missing. With several nodes let
        `curves.directory` be one that all share.

        Every figure is a sum over all ranks or a mean weighted by count, never one rank's view; one that
        nothing was counted for (no episode ended) has no point, and no point is NaN. Tags are those of SONIC
        where the meaning is the same; its `eps` and `episode` have none here.
        """,
        _table(("tag", "in the journal", "meaning"), rows),
        """
        Figures that a task reports come as `Env/<name>`: means over env steps. Each term of its reward comes as
        `Episode/rew_<term>`: the sum over an episode, mean over the episodes that ended, so that all terms
        together make `objective/rewards`. What follows is of the
        iteration, not of the algorithm:
        """,
        _table(("tag", "meaning"), own),
        """
        Time is that of a generation: from the moment it formed, or from the commit before. What a change of
        membership takes is not in it; `rallypoint_recovery_seconds` has that.

        ## Weights & Biases

        `pip install 'rallypoint[wandb]'` and `--set curves.wandb=true` feed it the same points, from a process
        beside the supervisor. The run's id is the job's uid, which every checkpoint names too, so a resumed
        job goes on in the same run. With `curves.wandb_mode = "offline"` files are only written, below
        `DIR/wandb`, for `wandb sync`. A step once fed cannot be taken back there: an iteration that is trained
        again after a restore keeps its first values.
        """,
    )


def log_events_page() -> str:
    """Every event of the log, with its levels and fields."""
    levels: dict[str, set[str]] = {}
    names: dict[str, dict[str, None]] = {}
    for site in logsites.sites():
        if site.event is not None:
            levels.setdefault(site.event, set()).update(site.levels)
            names.setdefault(site.event, {}).update(dict.fromkeys(site.fields))
    parts = [
        """
        The supervisor logs to standard error: JSON lines; text with colours on a terminal; and where standard
        error is systemd's journal, entries with fields of their own (`log.format`, `log.level`). One event name
        is one fact; a name never changes its meaning.

        Every line has:
        """,
        _table(("field", "what"), ((f"`{name}`", text) for name, text in logevents.BOUND.items())),
        _JOURNAL,
    ]
    for subject, events in logevents.EVENTS.items():
        rows = [
            (
                f"`{name}`",
                ", ".join(level for level in logsites.LEVELS if level in levels.get(name, ())),
                ", ".join(f"`{field}`" for field in names.get(name, ())),
                meaning,
            )
            for name, meaning in events.items()
        ]
        parts += [f"## {subject}", _table(("event", "level", "fields", "what it says"), rows)]
    return _page("Log events", *parts)


def configuration_page() -> str:
    """Every key with its type, default and meaning; overrides of tasks; derived timeouts."""
    parts = [
        """
        TOML. Precedence: command line (`--set section.key=value`) over the environment
        (`RALLYPOINT_<SECTION>__<KEY>`) over the file over the task's overrides over the profile over these
        defaults. `rallypoint config JOB.toml` prints the merged values and where each comes from. `none` unsets a key
        that may be unset. A key that does not exist is refused (exit code 2) with the nearest one that does,
        and so is a value out of range, with its origin.

        Workers of one job must agree on `job.seed` and everything in `[env]`, `[ppo]`,
        `[sampler]`, `[aux]` and `[distill]`: a run's directory
        that was made with other values is refused, with the difference.
        """
    ]
    documented = docstrings(Config)
    for section in fields(Config):
        kind = typing.cast(type, section.type)
        keys, types = docstrings(kind), typing.get_type_hints(kind)
        defaults = kind()
        rows = [
            (
                f"`{section.name}.{name}`",
                type_text(types[name]),
                f"`{configload.shown(f'{section.name}.{name}', getattr(defaults, name))}`",
                _markdown(text),
            )
            for name, text in keys.items()
        ]
        parts += [f"## [{section.name}]", documented.get(section.name, "")]
        parts.append(_table(("key", "type", "default", "meaning"), rows))
    parts += [
        "## Profiles",
        """
        `job.profile` (`--profile`) fills in what nothing above it sets. Each difference between the two
        trainers is one of these keys, and each may be set by itself.
        """,
        _table(("key", *(f"`{name}`" for name in PROFILES)), _profiles()),
        "## Overrides of tasks",
        "A task sets these over the profile, so that it learns well.",
    ]
    parts.append(_table(("task", "overrides"), _overrides()))
    parts += [
        "## Derived timeouts",
        """
        From `membership.detect_s`, in one place; here for the defaults and two workers.
        `rallypoint config` prints those of a job, and refuses values that nest wrongly.
        """,
        _table(("timeout", "seconds", "meaning"), _timeouts()),
    ]
    return _page("Configuration", *parts)


def docstrings(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass, by field, in the order of the source."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)  # noqa: S101 - the source of a class is one
    found: dict[str, str] = {}
    for field, after in zip(node.body, node.body[1:], strict=False):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = inspect.cleandoc(text)
    return found


def type_text(kind: Any) -> str:
    """A type as a reader of the page knows it."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(f"`{choice!r}`".replace("'", '"') for choice in arguments)
    if typing.get_origin(kind) is tuple:
        one = type_text(arguments[0])
        return f"list of {one}s" if Ellipsis in arguments else f"list of {len(arguments)} {one}s"
    if NoneType in arguments:
        return " or ".join([*(type_text(a) for a in arguments if a is not NoneType), "none"])
    return {int: "integer", float: "number", str: "text", bool: "true or false"}[kind]


def _profiles() -> Iterable[tuple[str, ...]]:
    for key in next(iter(PROFILES.values())):
        values = (profile[key] for profile in PROFILES.values())
        yield f"`{key}`", *(f"`{configload.shown(key, value)}`" for value in values)


def _overrides() -> Iterable[tuple[str, str]]:
    for task, values in TASK_OVERRIDES.items():
        shown = (f"`{key} = {configload.shown(key, value)}`" for key, value in values.items())
        yield f"`{task}`", "<br>".join(shown)


def _timeouts() -> Iterable[tuple[str, str, str]]:
    derived = timeouts.derive(Config())
    for name, text in docstrings(timeouts.Timeouts).items():
        yield f"`{name}`", f"{getattr(derived, name):g}", _markdown(text)


def _page(title: str, *parts: str) -> str:
    texts = [textwrap.dedent(part).strip() for part in parts]
    return "\n\n".join([_NOTE, f"# {title}", *filter(None, texts)]) + "\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _markdown(text: str) -> str:
    """A docstring's marks as a page's; None as it is written in a configuration."""
    return re.sub(r"\bNone:", "`none`:", text.replace("``", "`"))


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the pages into a folder."""
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(FOLDER, pages())
    sys.stdout.write(f"wrote {', '.join(pages())} in {FOLDER}\n")
