"""``rallypoint config``: the merged configuration, where each value comes from, the timeouts."""

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from rallypoint.daemon.commands import collectives, options, rslrl
from rallypoint.daemon.shared import configload, envbudget, timeouts
from rallypoint.daemon.shared.profiles import PROFILES


class ConfigCommand:
    """Prints TOML with the source of each value as a comment."""

    help: Final = "print the merged configuration with the source of each value"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        options.add_configuration(parser)
        text = "print the collectives of this job instead, with their bytes"
        parser.add_argument("--collectives", action="store_true", help=text)
        parser.add_argument(
            "--from-rsl-rl",
            type=Path,
            metavar="AGENT.yaml",
            help="print a job file with the values of an agent file of RSL-RL instead",
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(self, args: argparse.Namespace) -> int:
        """Print; exit code 0."""
        if args.from_rsl_rl is not None:
            print(rslrl.text(args.from_rsl_rl))
            return 0
        resolved = options.resolve(args)
        if args.collectives:
            config = resolved.config
            print(collectives.table_text(config, collectives.find_sizes(config)))
            return 0
        if args.json:
            print(json.dumps(_document(resolved)))
            return 0
        profile = PROFILES[resolved.config.job.profile]
        section = ""
        for path, value in configload.items(resolved.config):
            name, _, key = path.partition(".")
            if name != section:
                print(f"\n[{name}]" if section else f"[{name}]")
                section = name
            unset = "# " if value is None else ""
            text = f"{unset}{key} = {configload.shown(path, value)}"
            source = resolved.sources[path]
            if source.startswith("task ") and path in profile:
                value = configload.shown(path, profile[path])
                source += f" (profile {resolved.config.job.profile}: {value})"
            print(f"{text:<48}  # {source}")
        world_size = envbudget.world_size_range(resolved.config)[1]
        times = timeouts.derive(resolved.config, world_size)
        print(f"\n# timeouts derived from membership.detect_s, for up to {world_size} workers")
        for field in fields(times):
            print(f"# {field.name:<18} {getattr(times, field.name):g} s")
        print(f"# configuration hash {configload.config_hash(resolved.config)}")
        return 0


def _document(resolved: configload.Resolved) -> dict[str, Any]:
    """Values by section and key, each with its source; timeouts; the hash that workers share."""
    values: dict[str, dict[str, Any]] = {}
    for path, value in configload.items(resolved.config):
        section, _, key = path.partition(".")
        shown = {"value": value, "source": resolved.sources[path]}
        values.setdefault(section, {})[key] = shown
    times = timeouts.derive(resolved.config, envbudget.world_size_range(resolved.config)[1])
    return {
        "values": values,
        "timeouts": {field.name: getattr(times, field.name) for field in fields(times)},
        "hash": configload.config_hash(resolved.config),
    }


COMMAND = ConfigCommand()
