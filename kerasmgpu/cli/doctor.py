"""`kerasmgpu doctor`: can a job run here, and if not, what mends it."""

from __future__ import annotations

import argparse
import dataclasses
import json

HELP = "check whether a job can run here, and say what mends it"

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kerasmgpu doctor`."""
    add = parser.add_argument
    add("-H", dest="hosts", metavar="HOSTS", help="hosts to look at, such as a:4,b:4")
    add("--hostfile", metavar="FILE", help="the same, in lines `name slots=4`")
    add("--network-interface", metavar="NAME", help="the network to exchange over")
    add("--ssh-port", type=int, metavar="PORT", help="port of the hosts' ssh")
    add("--ssh-identity-file", metavar="FILE", help="the ssh key to use")
    add("--json", action="store_true", help="print JSON instead of a table")


def main(args: argparse.Namespace) -> int:
    """Runs the checks; 0 only if a job can run."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kerasmgpu import diagnostics
    from kerasmgpu.launch import spec as specs

    hosts: tuple[specs.Host, ...] = ()
    if args.hosts is not None:
        hosts = specs.parse_hosts(args.hosts)
    elif args.hostfile is not None:
        hosts = specs.parse_hostfile(args.hostfile)
    spec = specs.JobSpec(
        command=("true",),
        num_ranks=max(1, sum(host.slots for host in hosts)),
        hosts=hosts,
        network_interface=args.network_interface,
        ssh_port=args.ssh_port,
        ssh_identity_file=args.ssh_identity_file,
    )
    console = Console(stderr=args.json)
    checks = []
    with console.status("checking: starts TensorFlow three times"):
        for check in diagnostics.run_checks(spec):
            checks.append(check)
    well = diagnostics.can_run(checks)
    if args.json:
        listed = [dataclasses.asdict(check) for check in checks]
        print(json.dumps({"can_run": well, "checks": listed}, indent=2))
        return int(not well)
    table = Table("check", "status", "found, and what mends it")
    for check in checks:
        told = check.detail + (f"\n-> {check.mend}" if check.mend else "")
        colour = _COLOURS[check.status]
        # Text, not markup: messages contain square brackets.
        table.add_row(check.name, f"[{colour}]{check.status}[/]", Text(told))
    console.print(table)
    console.print("A job can run." if well else "A job cannot run: see `failed` above.")
    return int(not well)
