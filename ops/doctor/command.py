"""``rallypoint doctor``: every check, each with a verdict and, where something is wrong, the remedy."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from rallypoint.daemon.commands import options
from rallypoint.daemon.commands.client import AdminClient, NoSupervisorError
from rallypoint.daemon.shared.command import Command
from rallypoint.daemon.shared.errors import ConfigError
from rallypoint.ops.doctor import devices, host, network, services
from rallypoint.ops.doctor.finding import Check, Finding, Patient

CHECKS: Final[Mapping[str, Check]] = MappingProxyType(
    {
        "disk": host.disk,
        "limits": host.limits,
        "clock": host.clock,
        "cores": host.cores,
        "shared memory": host.shared_memory,
        "interface": network.interface,
        "addresses": network.addresses,
        "ports": network.ports,
        "metrics": network.metrics,
        "etcd": services.etcd,
        "checkpoints": services.checkpoints,
        "gpu": devices.gpus,
        "torch": devices.torch_and_nccl,
        "simulator": devices.simulator,
    }
)
"""By name, the quick ones first."""
_MARKS: Final = {"pass": "green", "warn": "yellow", "fail": "red"}


class DoctorCommand:
    """Looks, and leaves nothing behind."""

    help: Final = "check whether a job with this configuration can run on this machine"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""
        options.add_configuration(parser)
        parser.add_argument(
            "--dir", type=Path, metavar="DIR", help="directory of the run; default runs/<job>"
        )
        parser.add_argument(
            "--only", metavar="CHECKS", help=f"only these, separated by commas: {', '.join(CHECKS)}"
        )
        parser.add_argument("--strict", action="store_true", help="exit code 1 for warnings too")
        parser.add_argument("--json", action="store_true", help="print one JSON array")

    def run(self, args: argparse.Namespace) -> int:
        """0 when nothing failed, else 1: as ExecStartPre of a service it keeps the job from starting."""
        config = options.resolve(args).config
        directory = (args.dir or Path("runs") / config.job.name).absolute()
        patient = Patient(config, directory, _runs(directory))
        findings = []
        for finding in examine(patient, _chosen(args.only)):
            findings.append(finding)
            if not args.json:
                _print(finding)
        if args.json:
            print(msgspec.json.encode(findings).decode())
        bad = ("fail", "warn") if args.strict else ("fail",)
        return 1 if any(finding.level in bad for finding in findings) else 0


def examine(patient: Patient, names: tuple[str, ...]) -> Iterator[Finding]:
    """The findings of these checks, as they come."""
    for name in names:
        yield from CHECKS[name](patient)


def _chosen(only: str | None) -> tuple[str, ...]:
    if only is None:
        return tuple(CHECKS)
    names = tuple(name.strip() for name in only.split(","))
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise ConfigError(
            f"--only: no check is named {unknown[0]!r}; there are {', '.join(CHECKS)}"
        )
    return names


def _runs(directory: Path) -> bool:
    try:
        with AdminClient(directory) as client:
            client.ask(command="status")
    except NoSupervisorError:
        return False
    return True


def _print(finding: Finding) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    mark = Text(finding.level.ljust(5), style=_MARKS[finding.level])
    console.print(mark, Text(f"{finding.check}: {finding.text}"))
    if finding.remedy:
        console.print(Text(f"      remedy: {finding.remedy}", style="bold"))


COMMAND: Command = DoctorCommand()
