"""``rallypoint env check BACKEND``: what an env breaks of its contract, in words."""

import argparse
import sys
from dataclasses import dataclass

import msgspec

from rallypoint.daemon.shared.command import Command
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.trainer.envs.backends import find_backend, parse_overrides
from rallypoint.trainer.envs.base import EnvRequest
from rallypoint.trainer.envs.contract import Finding, check_env, describe
from rallypoint.trainer.envs.rules import RULES


@dataclass(frozen=True)
class EnvCommand:
    """Checks of envs; no supervisor is needed."""

    help: str = "check an env of your own against the contract"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the subcommand."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        text = "make envs of a backend, use them as the trainer does, and say what is wrong"
        check = actions.add_parser("check", help=text, description=text)
        check.add_argument("backend", help="module:factory, or what env.backend names")
        check.add_argument("--task", help="env.task (default: the name of the factory)")
        check.add_argument(
            "--envs",
            type=int,
            default=8,
            metavar="N",
            help="envs at a time, at least 4 (default: 8)",
        )
        check.add_argument("--seed", type=int, default=1, metavar="S", help="default: 1")
        check.add_argument(
            "--override",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="one of env.overrides; may be given several times",
        )
        check.add_argument(
            "--rule",
            action="append",
            choices=sorted(RULES),
            metavar="RULE",
            help=f"only this one; may be given several times: {', '.join(RULES)}",
        )
        check.add_argument("--json", action="store_true", help="print one JSON object")

    def run(self, args: argparse.Namespace) -> int:
        """Check and print; 1 when something is wrong."""
        if args.envs < 4:
            raise ConfigError(
                f"--envs {args.envs} must be at least 4: the checks split and halve them"
            )
        backend = find_backend(args.backend)
        request = EnvRequest(
            task=args.task or args.backend.rpartition(":")[2],
            seed=args.seed,
            num_envs=args.envs,
            overrides=parse_overrides(args.override),
        )
        rules = {name: rule for name, rule in RULES.items() if name in (args.rule or RULES)}
        env = backend(request)
        spec = env.spec
        env.close()
        if not args.json:
            print(describe(spec), file=sys.stderr)
        found = check_env(backend, request, rules)
        if args.json:
            document = {"task": spec.task, "rules": [*rules], "findings": found}
            print(msgspec.json.encode(document).decode())
        else:
            print(_text(found, len(rules)))
        return 1 if found else 0


def _text(found: list[Finding], rules: int) -> str:
    if not found:
        return f"all {rules} rules hold"
    broken = len({finding.rule for finding in found})
    return "\n".join([*map(str, found), f"{broken} of {rules} rules are broken"])


COMMAND: Command = EnvCommand()
"""Entry point of the command ``env``."""
