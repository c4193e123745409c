"""Checks of all hosts, side by side, before a job starts on them.

Each host runs `kerasmgpu.launch.probe` over ssh: it tells what is there, listens on a
port, and tries the ports of all others.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from kerasmgpu.errors import LaunchError
from kerasmgpu.launch import command as commands
from kerasmgpu.launch.probe import ANSWER_MARK
from kerasmgpu.launch.spec import Host, JobSpec

HOST_TIMEOUT_SECONDS = 10.0


@dataclasses.dataclass
class HostReport:
    """What a host says about itself, or what is wrong with it."""

    host: Host
    problem: str | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    unreachable: list[str] = dataclasses.field(default_factory=list)


def check_hosts(spec: JobSpec) -> None:
    """Refuses to start a job on hosts that cannot run it.

    Raises:
        LaunchError: with every problem found, one a line, and how to mend each.
    """
    problems = problems_of(probe_hosts(spec))
    if problems:
        raise LaunchError("the hosts are not ready:\n  " + "\n  ".join(problems))


def problems_of(reports: Sequence[HostReport]) -> list[str]:
    """What is wrong, in words, over all hosts."""
    problems = [report.problem for report in reports if report.problem is not None]
    problems += [
        f"{report.host.name} cannot reach {', '.join(report.unreachable)}. "
        "Open the firewalls between the hosts for TCP, or name a network "
        "that joins them with --network-interface."
        for report in reports
        if report.unreachable
    ]
    return problems + version_problems(reports)


def version_problems(reports: Sequence[HostReport]) -> list[str]:
    """Which versions differ between the hosts."""
    sound = [report for report in reports if report.problem is None]
    problems = []
    for name in sound[0].facts["versions"] if sound else ():
        found: dict[str, list[str]] = {}
        for report in sound:
            version = report.facts["versions"].get(name) or "not installed"
            found.setdefault(version, []).append(report.host.name)
        if len(found) > 1:
            told = "; ".join(f"{v} on {', '.join(h)}" for v, h in found.items())
            problems.append(
                f"different versions of {name}: {told}. Install the same everywhere."
            )
    return problems


def probe_hosts(spec: JobSpec) -> list[HostReport]:
    """Probes all hosts at the same time."""
    probes = [_Probe(spec, HostReport(host)) for host in spec.hosts]
    with concurrent.futures.ThreadPoolExecutor(len(probes)) as pool:
        try:
            # All listen before any tries, and until all have tried.
            list(pool.map(_Probe.start, probes))
            reports = [probe.report for probe in probes]
            list(pool.map(lambda probe: probe.try_others(reports), probes))
        finally:
            list(pool.map(_Probe.close, probes))
    return reports


class _Probe:
    """The probe's process on one host, over ssh."""

    def __init__(self, spec: JobSpec, report: HostReport) -> None:
        self.report = report
        self._spec = spec
        self._name = report.host.name
        self._timed_out = False
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts the probe, and has it tell what is there."""
        if not self.report.host.is_local:
            try:
                socket.getaddrinfo(self._name, 22)
            except OSError as error:
                self.report.problem = (
                    f"{self._name}: the name does not resolve ({error}). Check its "
                    "spelling, or add it to DNS or /etc/hosts."
                )
                return
        try:
            self._process = subprocess.Popen(
                probe_command(self._spec, self.report.host),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            self.report.problem = f"{self._name}: {error}."
            return
        answer = self._ask({"interface": self._spec.network_interface})
        if answer is not None:
            self.report.facts = answer
            self._check_facts()

    def try_others(self, reports: Sequence[HostReport]) -> None:
        """Has the host try the ports of all the others."""
        if self.report.problem is not None:
            return
        others = [
            {
                "name": other.host.name,
                "addresses": other.facts["addresses"],
                "port": other.facts["port"],
            }
            for other in reports
            if other is not self.report and other.problem is None
        ]
        answer = self._ask({"others": others})
        if answer is not None:
            self.report.unreachable = list(answer["unreachable"])

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """The probe's answer; None, and a problem noted, where there is none."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return None
        timer = threading.Timer(HOST_TIMEOUT_SECONDS, self._time_out)
        timer.start()
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                # A login script may greet: only our own line counts.
                if line.startswith(ANSWER_MARK):
                    return dict(json.loads(line[len(ANSWER_MARK) :]))
        except OSError:
            pass  # It has ended; what it said last tells why.
        finally:
            timer.cancel()
        said = process.stderr.read().strip() if process.stderr is not None else ""
        self.report.problem = f"{self._name}: {self._explain(process.wait(), said)}"
        return None

    def _explain(self, code: int, said: str) -> str:
        ssh = shlex.join(ssh_command(self._spec, self.report.host))
        if self._timed_out:
            return f"no answer within {HOST_TIMEOUT_SECONDS:.0f} s. Try `{ssh} true`."
        last = said.splitlines()[-1] if said else f"exit code {code}"
        if "No module named" in said:
            return (
                f"{last}: install kerasmgpu there too, for {sys.executable} "
                "(the same path as here)."
            )
        if code in (126, 127):
            return (
                f"there is no {sys.executable} ({last}). The hosts need the same "
                "Python environment in the same folder."
            )
        if code == 255:
            return (
                f"ssh does not work without a prompt ({last}). Put your public key "
                f"there (`ssh-copy-id {self._name}`), log in once by hand to accept "
                f"its host key, and try `{ssh} true`."
            )
        return f"the probe failed: {last}"

    def _check_facts(self) -> None:
        facts = self.report.facts
        interface = self._spec.network_interface
        if interface and interface not in facts["interfaces"]:
            self.report.problem = (
                f"{self._name}: there is no network interface {interface!r}; it has "
                f"{', '.join(facts['interfaces'])}."
            )

    def _time_out(self) -> None:
        self._timed_out = True
        if self._process is not None:
            self._process.kill()


def ssh_command(spec: JobSpec, host: Host) -> list[str]:
    """`ssh` to a host, never asking anything; host keys are checked as ever."""
    return [
        "ssh",
        "-o",
        "BatchMode=yes",
        "-o",
        f"ConnectTimeout={HOST_TIMEOUT_SECONDS:.0f}",
        *commands.ssh_arguments(spec),
        host.name,
    ]


def probe_command(spec: JobSpec, host: Host) -> list[str]:
    """The argument list that runs the probe on a host."""
    program = [sys.executable, "-m", "kerasmgpu.launch.probe"]
    if host.is_local:
        return program
    # ssh joins its arguments for the other side's shell: quote each.
    path = os.environ.get("PYTHONPATH")
    settings = ["env", f"PYTHONPATH={path}"] if path else []
    return [*ssh_command(spec, host), *map(shlex.quote, [*settings, *program])]
