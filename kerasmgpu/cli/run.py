"""`kerasmgpu run`: starts a job of several ranks, here or on several hosts."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import sys
from pathlib import Path

from kerasmgpu.errors import InvalidArgumentError, KerasMGPUError, LaunchError
from kerasmgpu.launch.spec import LAUNCHERS, JobSpec

HELP = "run a program on several ranks, here or on several hosts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kerasmgpu run`."""
    add = parser.add_argument
    add("-np", dest="num_ranks", type=int, metavar="N", help="ranks to start")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", dest="hosts", metavar="HOSTS", help="such as a:4,b:4")
    where.add_argument("--hostfile", metavar="FILE", help="lines `name slots=4`")
    add("--launcher", choices=LAUNCHERS, default="auto", help="what starts the ranks")
    add("--gloo", action="store_true", help="exchange over Gloo: no MPI is needed")
    add("--network-interface", metavar="NAME", help="the network to exchange over")
    add("--ssh-port", type=int, metavar="PORT", help="port of the hosts' ssh")
    add("--ssh-identity-file", metavar="FILE", help="the ssh key to use")
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for all ranks, on all hosts (may be repeated)",
    )
    add("--settings", metavar="FILE", help="of `kerasmgpu bench --tune`")
    add("--start-timeout", type=float, metavar="SECONDS", help="for ranks to start")
    add("--output-dir", metavar="DIR", help="keep rank.N.out and rank.N.err there")
    add("--dry-run", action="store_true", help="print the command, start nothing")
    add("--verbose", action="store_true", help="show the command and its messages")
    add(
        "command",
        nargs=argparse.REMAINDER,
        metavar="[--] PROGRAM ...",
        help="the program to run on every rank, and its arguments",
    )


def main(args: argparse.Namespace) -> int:
    """Runs the job; returns its exit code (2 where it could not be understood)."""
    try:
        return _run(args)
    except KerasMGPUError as error:
        print(f"kerasmgpu run: {error}", file=sys.stderr)
        return 2 if isinstance(error, (InvalidArgumentError, LaunchError)) else 1


def _run(args: argparse.Namespace) -> int:
    from kerasmgpu.launch.output import Output
    from kerasmgpu.launch.plan import make_plan
    from kerasmgpu.launch.preflight import check_hosts
    from kerasmgpu.launch.runner import Runner

    spec = _spec(args)
    plan = make_plan(spec)
    for warning in plan.warnings:
        print(f"kerasmgpu: warning: {warning}", file=sys.stderr)
    if args.dry_run:
        print(shlex.join(plan.argv))
        print(f"each rank runs: {shlex.join(spec.command)}")
        return 0
    output = Output(spec.output_dir)
    try:
        if not spec.is_local and not spec.in_slurm:
            check_hosts(spec)
        outcome = Runner(spec, plan, output).run()
        if outcome.message:
            output.say(outcome.message)
        return outcome.exit_code
    finally:
        output.close()


def _spec(args: argparse.Namespace) -> JobSpec:
    from kerasmgpu.launch import spec as specs

    environ = os.environ
    in_slurm = False
    if args.hosts is not None:
        hosts = specs.parse_hosts(args.hosts)
    elif args.hostfile is not None:
        hosts = specs.parse_hostfile(args.hostfile)
    else:
        allocated = specs.slurm_hosts(environ)
        in_slurm = allocated is not None
        hosts = allocated or ()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    interface = args.network_interface
    if interface is not None and not re.fullmatch(r"[A-Za-z0-9_.@-]+", interface):
        raise InvalidArgumentError(
            f"Expected the name of one interface. Received: {interface!r}."
        )
    if interface is not None and interface not in dict(socket.if_nameindex()).values():
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise InvalidArgumentError(
            f"This machine has no network interface {interface!r}. It has: {names}."
        )
    if args.ssh_port is not None and not 0 < args.ssh_port < 65536:
        raise InvalidArgumentError(
            f"Expected --ssh-port from 1 to 65535. Received: {args.ssh_port}."
        )
    identity = args.ssh_identity_file
    if identity is not None and not os.path.exists(identity):
        raise InvalidArgumentError(f"The ssh key {identity!r} does not exist.")
    if args.start_timeout is not None and not args.start_timeout > 0:
        raise InvalidArgumentError(
            f"Expected a positive --start-timeout. Received: {args.start_timeout}."
        )
    env = specs.parse_env(args.env, environ)
    gloo = args.gloo
    if args.settings is not None:
        from kerasmgpu.perf.settings import read_settings

        settings = read_settings(Path(args.settings))
        # What the user has set stays.
        env = {n: v for n, v in settings.environment.items() if n not in environ} | env
        gloo = gloo or settings.gloo
    return specs.JobSpec(
        command=specs.check_command(command),
        num_ranks=specs.choose_num_ranks(args.num_ranks, hosts, environ),
        hosts=hosts,
        launcher=args.launcher,
        gloo=gloo,
        network_interface=interface,
        ssh_port=args.ssh_port,
        ssh_identity_file=identity,
        env=env,
        start_timeout_seconds=args.start_timeout,
        output_dir=args.output_dir,
        verbose=args.verbose,
        in_slurm=in_slurm,
    )
