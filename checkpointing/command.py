"""``rallypoint checkpoints list|verify|inspect|prune|copy URL [--json]``."""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from rallypoint.checkpointing import credentials, restore
from rallypoint.checkpointing.errors import CheckpointError
from rallypoint.checkpointing.manifest import CheckpointInfo, Manifest
from rallypoint.checkpointing.opening import open_storage
from rallypoint.checkpointing.progress import Bar
from rallypoint.checkpointing.storage import LocalStorage
from rallypoint.checkpointing.store import CheckpointStore, Retention
from rallypoint.daemon.shared.command import Command


class Row(TypedDict):
    """One checkpoint, as ``--json`` prints it."""

    iteration: int
    generation: int
    path: str
    verified: bool
    size_bytes: int
    error: str | None


@dataclass(frozen=True)
class CheckpointsCommand:
    """List checkpoints, check that they can be restored, look into one, thin them out, copy them."""

    help: str = "list, verify, inspect, prune or copy checkpoints"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the subcommands."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        for name, run, text in (
            (
                "list",
                _list,
                "show every committed checkpoint, newest first, and whether it verifies",
            ),
            ("verify", _verify, "the same, with exit code 1 when one is damaged or there is none"),
            ("inspect", _inspect, "show the manifest of the newest one, and its tensors"),
            ("prune", _prune, "show which checkpoints no rule keeps; with --yes, remove them"),
            ("copy", _copy, "copy the newest one that verifies, manifest last, and read it back"),
        ):
            action = actions.add_parser(name, help=text, description=text)
            action.set_defaults(do=run)
            action.add_argument(
                "url", metavar="URL", help="a checkpoint, a directory of them, or a run's directory"
            )
            if name == "prune":
                _add_rules(action)
            if name == "copy":
                action.add_argument(
                    "target", metavar="TARGET", help="a directory or URL of checkpoints"
                )
                action.add_argument("--all", action="store_true", help="every one that verifies")
                action.add_argument(
                    "--target-credentials-file",
                    metavar="FILE",
                    help="the same of TARGET (default: that of URL, where both have one backend)",
                )
            credentials.add_option(action)
            action.add_argument("--json", action="store_true", help="print JSON")

    def run(self, args: argparse.Namespace) -> int:
        """The exit code; of ``verify`` and ``copy`` 1 when something is damaged, of ``prune`` 1 when
        something could not be removed. Raises `CheckpointError` where nothing is there: for ``list``
        and ``prune`` a directory without a checkpoint yet is something."""
        code: int = args.do(args)
        return code


def _add_rules(parser: argparse.ArgumentParser) -> None:
    keep = Retention()
    parser.add_argument(
        "--keep-last", type=int, default=keep.last, metavar="K", help=f"default: {keep.last}"
    )
    parser.add_argument(
        "--keep-every",
        type=int,
        metavar="M",
        help="also those of iterations that are multiples of M",
    )
    parser.add_argument(
        "--keep-best", type=int, default=keep.best, metavar="N", help="also the N best by --metric"
    )
    parser.add_argument(
        "--metric", default=keep.metric, metavar="NAME", help=f"default: {keep.metric}"
    )
    parser.add_argument("--least", action="store_true", help="the least is the best")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--dry-run", action="store_true", help="remove nothing (the default)")
    how.add_argument("--yes", action="store_true", help="really remove them")


def _find(
    args: argparse.Namespace, *, may_be_empty: bool = False
) -> tuple[CheckpointStore, list[CheckpointInfo]]:
    store, infos = restore.find(args.url, args.credentials_file)
    if not infos:
        nothing = restore.nothing_at(args.url)
        if not (may_be_empty and _is_directory(args.url)):
            raise nothing
        print(nothing, file=sys.stderr)
    return store, infos


def _is_directory(url: str) -> bool:
    """Object storage has none: what holds nothing is not there."""
    storage = open_storage(url)
    return isinstance(storage, LocalStorage) and Path(storage.root).is_dir()


def _list(args: argparse.Namespace) -> int:
    _show_rows(*_find(args, may_be_empty=True), as_json=args.json)
    return 0


def _verify(args: argparse.Namespace) -> int:
    rows = _show_rows(*_find(args), as_json=args.json)
    return 0 if all(row["verified"] for row in rows) else 1


def _show_rows(store: CheckpointStore, infos: list[CheckpointInfo], *, as_json: bool) -> list[Row]:
    with Bar("verifying", sum(info.size_bytes for info in infos)) as bar:
        rows = [_row(store, info, bar.add) for info in infos]
    if as_json:
        print(msgspec.json.encode(rows).decode())
    else:
        _print_table(rows)
    return rows


def _row(store: CheckpointStore, info: CheckpointInfo, on_bytes: Callable[[int], None]) -> Row:
    error: str | None = None
    try:
        store.verify(info)
    except CheckpointError as damage:
        error = str(damage)
    on_bytes(info.size_bytes)
    return Row(
        iteration=info.iteration,
        generation=info.generation,
        path=info.path,
        verified=error is None,
        size_bytes=info.size_bytes,
        error=error,
    )


def _print_table(rows: list[Row]) -> None:
    if rows:
        print(f"{'iteration':>10} {'generation':>10} {'bytes':>12}  {'verified':8}  path")
    for row in rows:
        print(
            f"{row['iteration']:>10} {row['generation']:>10} {row['size_bytes']:>12}  "
            f"{'yes' if row['verified'] else 'DAMAGED':8}  {row['path']}"
        )
        if row["error"]:
            print(f"{'':>10} {row['error']}")


def _inspect(args: argparse.Namespace) -> int:
    store, infos = _find(args)
    manifest = store.manifest(infos[0])
    row = _row(store, infos[0], lambda count: None)
    if args.json:
        document = {**row, "manifest": msgspec.to_builtins(manifest)}
        print(msgspec.json.encode(document).decode())
    else:
        print("\n".join(_manifest_text(manifest, row)))
    return 0


def _manifest_text(manifest: Manifest, row: Row) -> Iterable[str]:
    yield f"{row['path']} ({'verified' if row['verified'] else 'DAMAGED: ' + str(row['error'])})"
    facts: dict[str, Any] = {
        "job": f"{manifest.job} ({manifest.job_uid or 'no uid'})",
        "iteration": manifest.iteration,
        "generation": manifest.generation,
        "env steps": f"{manifest.env_steps:,}",
        "world size": f"{manifest.world_size}, budget {manifest.budget}",
        "warm start": manifest.warm_start or "-",
        "configuration": manifest.config_hash,
        "versions": ", ".join(f"{name} {value}" for name, value in manifest.versions.items()),
        "schema": manifest.schema,
    }
    yield from (f"{name:<14} {value}" for name, value in facts.items())
    for name, record in manifest.files.items():
        yield f"{'file':<14} {name}, {record.size_bytes:,} bytes, {record.checksum}"
    for name, value in sorted(manifest.metrics.items()):
        yield f"{'figure':<14} {name} = {'not finite' if value is None else f'{value:.6g}'}"
    width = max((len(name) for name in manifest.entries), default=0)
    for name, entry in sorted(manifest.entries.items()):
        yield f"{name:<{width}}  {entry.scope:<10}  {entry.dtype:<4}  {list(entry.shape)}"


def _prune(args: argparse.Namespace) -> int:
    store, infos = _find(args, may_be_empty=True)
    if not infos:
        return 0
    if open_storage(args.url).root == infos[0].path:
        raise CheckpointError(
            f"{args.url} is one checkpoint: prune takes a directory of checkpoints, or a run's directory"
        )
    try:
        keep = Retention(
            last=args.keep_last,
            every=args.keep_every,
            best=args.keep_best,
            metric=args.metric,
            least=args.least,
        )
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    with Bar("looking" if not args.yes else "removing", None):
        pruned = store.prune(keep, dry_run=not args.yes)
    if args.json:
        document = {"dry_run": not args.yes, **msgspec.to_builtins(pruned)}
        print(msgspec.json.encode(document).decode())
    else:
        _tell_pruned(pruned.kept, pruned.removed, pruned.failed, really=args.yes)
    return 1 if pruned.failed else 0


def _tell_pruned(
    kept: Iterable[str], removed: Iterable[str], failed: Iterable[str], *, really: bool
) -> None:
    for path in kept:
        print(f"kept           {path}")
    for path in removed:
        print(f"{'removed' if really else 'would remove':<14} {path}")
    for problem in failed:
        print(problem, file=sys.stderr)
    if not really:
        print("nothing was removed; --yes does it")


def _copy(args: argparse.Namespace) -> int:
    store, infos = _find(args)
    theirs = args.target_credentials_file
    if theirs is None and _scheme(args.target) == _scheme(args.url):
        theirs = args.credentials_file
    target = CheckpointStore(_place(args.target), credentials_file=theirs)
    done: list[CheckpointInfo] = []
    problems: list[str] = []
    wanted = infos if args.all else infos[:]
    with Bar("copying", sum(i.size_bytes for i in (wanted if args.all else wanted[:1]))) as bar:
        for info in wanted:
            try:
                done.append(store.copy(info, target, bar.add))
            except CheckpointError as error:
                problems.append(str(error))
            if done and not args.all:
                break
    for problem in problems:
        print(f"not copied: {problem}", file=sys.stderr)
    if args.json:
        print(msgspec.json.encode([info.path for info in done]).decode())
    for info in done if not args.json else ():
        print(f"copied and verified {info.path}")
    return 0 if done and not problems else 1


def _place(target: str) -> str:
    """Where checkpoints go: of a run's directory the one in it that has them."""
    storage = open_storage(target)
    is_run = isinstance(storage, LocalStorage) and Path(storage.root, "state.json").exists()
    return f"{storage.root}/checkpoints" if is_run else target


def _scheme(url: str) -> str:
    return url.partition("://")[0] if "://" in url else "file"


COMMAND: Command = CheckpointsCommand()
