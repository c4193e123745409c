"""Several hosts on one machine: network namespaces, each with its own sshd.

Each host has a name, an address on a common bridge, host name and sshd (own keys, own
port, own configuration in a temporary folder). Root's own ssh set-up is not touched.
A host's link may be made as slow as a real one, in each direction (`tc tbf`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from kerasmgpu.errors import InvalidArgumentError, LaunchError

SSHD = "/usr/sbin/sshd"
SSH_PORT = 2222
NAMES = ("hosta", "hostb", "hostc")
#: What a link lets through at once; a packet as the kernel hands it on has 64 KB.
_BURST_BYTES = 128 << 10
#: Of a link's queue: long enough that nothing is dropped.
_QUEUE_BYTES = 32 << 20
_RUN_AS_HOST = 'hostname "$1" && shift && exec "$@"'


def why_not() -> str | None:
    """Why this machine cannot make hosts, or None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc", "unshare", "ssh", "ssh-keygen", SSHD):
        if shutil.which(program) is None:
            return f"{program} is missing (apt-get install iproute2 openssh-server)"
    made = subprocess.run(
        ["ip", "netns", "add", "kmg-try"], capture_output=True, text=True
    )
    if made.returncode:
        return f"`ip netns add` fails: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", "kmg-try"], check=True)
    return None


def check_can_make_hosts() -> None:
    """Raises an `InvalidArgumentError` where `why_not` has a reason."""
    reason = why_not()
    if reason is not None:
        raise InvalidArgumentError(
            "Expected a machine that can make hosts of its own for --bandwidth. "
            f"Received: one where {reason}. Run it as root, or leave --bandwidth out."
        )


class VirtualHosts:
    """A context manager: hosts while it is open, nothing afterwards.

    Args:
        folder: that does not exist yet, for keys and configurations.
        python_bin: the folder of the hosts' `python`.
        names: of the hosts.
        bandwidth: of each host's link, bytes/s in each direction; None for no limit.
    """

    def __init__(
        self,
        folder: Path,
        python_bin: Path,
        names: Sequence[str] = NAMES,
        bandwidth: float | None = None,
    ) -> None:
        self._folder = folder
        self.names = tuple(names)
        self._bandwidth = bandwidth
        self._path = f"{folder / 'bin'}:{python_bin}:{os.environ['PATH']}"
        tag = f"kmg{os.getpid()}"
        self._bridge = f"{tag}br"
        self._namespaces = {name: f"{tag}-{name}" for name in self.names}
        self._links = {
            name: f"{tag}v{number}" for number, name in enumerate(self.names)
        }
        self._addresses = {
            name: f"10.{77 + os.getpid() % 100}.9.{number}"
            for number, name in enumerate(self.names, start=1)
        }
        self._sshds: list[subprocess.Popen[bytes]] = []
        self._made_run_sshd = False

    def __enter__(self) -> VirtualHosts:
        remove_left_hosts()
        try:
            self._write_keys()
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("link", "set", self._bridge, "up")
            for name in self.names:
                self._make_host(name)
            self._wait_for_sshd()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for namespace in self._namespaces.values():
            _end_all(namespace)
        for sshd in self._sshds:
            sshd.wait()
        for link in self._links.values():
            _ip("link", "del", link, check=False)
        for namespace in self._namespaces.values():
            _remove(namespace)
        _ip("link", "del", self._bridge, check=False)
        with contextlib.suppress(OSError):
            os.rmdir("/etc/netns")
        if self._made_run_sshd:
            with contextlib.suppress(OSError):
                os.rmdir("/run/sshd")

    def on_host(self, host: str, command: Sequence[str]) -> list[str]:
        """The command that runs a command on a host, with its ssh and python."""
        return [*self._as_host(host), "env", f"PATH={self._path}", *command]

    def popen(
        self, command: list[str], *, host: str | None = None, **kwargs: object
    ) -> subprocess.Popen[str]:
        """Starts a command on a host, the first where none is named."""
        environ = {
            **os.environ,
            "PATH": self._path,
            **kwargs.pop("env", {}),  # type: ignore[dict-item]
        }
        return subprocess.Popen(
            [*self._as_host(host or self.names[0]), *command],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **kwargs,  # type: ignore[call-overload]
        )

    def unplug(self, name: str) -> None:
        _ip("link", "set", self._links[name], "down")

    def plug_in(self, name: str) -> None:
        _ip("link", "set", self._links[name], "up")

    def busy_pids(self, name: str) -> list[int]:
        """Processes on a host that are not its sshd."""
        sshds = {sshd.pid for sshd in self._sshds}
        found = []
        for pid in self.pids(self._namespaces[name]):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if pid not in sshds and b"sshd" not in command and command:
                    found.append(pid)
        return found

    @staticmethod
    def pids(namespace: str) -> list[int]:
        return [int(pid) for pid in _told("ip", "netns", "pids", namespace).split()]

    def _as_host(self, name: str) -> list[str]:
        # `ip netns exec` gives the network and /etc/hosts, `unshare` a host name.
        return [
            *("ip", "netns", "exec", self._namespaces[name]),
            *("unshare", "--uts", "sh", "-c", _RUN_AS_HOST, "sh", name),
        ]

    def _write_keys(self) -> None:
        folder = self._folder
        (folder / "bin").mkdir(parents=True)
        for key in ("host_key", "user_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key],
                check=True,
            )
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        host_key = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text(
            "".join(f"[{name}]:{SSH_PORT} {host_key}" for name in self.names)
        )
        (folder / "ssh_config").write_text(
            f"UserKnownHostsFile {folder / 'known_hosts'}\n"
            "GlobalKnownHostsFile /dev/null\n"
            "StrictHostKeyChecking yes\nCheckHostIP no\n"
        )
        wrapper = folder / "bin" / "ssh"
        wrapper.write_text(
            f'#!/bin/sh\nexec /usr/bin/ssh -F {folder / "ssh_config"} "$@"\n'
        )
        wrapper.chmod(0o755)

    @property
    def ssh_options(self) -> list[str]:
        """The options of `kerasmgpu run` for these hosts."""
        key = str(self._folder / "user_key")
        return ["--ssh-port", str(SSH_PORT), "--ssh-identity-file", key]

    def _make_host(self, name: str) -> None:
        namespace, link = self._namespaces[name], self._links[name]
        _ip("netns", "add", namespace)
        etc = Path("/etc/netns", namespace)
        etc.mkdir(parents=True)
        lines = [f"{address} {host}" for host, address in self._addresses.items()]
        (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        _ip("link", "add", link, "type", "veth", "peer", "eth0", "netns", namespace)
        _ip("link", "set", link, "master", self._bridge, "up")
        inside = ("-n", namespace)
        _ip(*inside, "addr", "add", f"{self._addresses[name]}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "eth0", "up")
        _ip(*inside, "link", "set", "lo", "up")
        config = self._folder / f"sshd_config.{name}"
        config.write_text(
            f"Port {SSH_PORT}\nListenAddress {self._addresses[name]}\n"
            f"HostKey {self._folder / 'host_key'}\n"
            f"AuthorizedKeysFile {self._folder / 'authorized_keys'}\n"
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\n"
            "PermitRootLogin prohibit-password\nPidFile none\nMaxStartups 100\n"
        )
        if self._bandwidth is not None:
            slow = ["root", "tbf", "rate", f"{round(8 * self._bandwidth)}bit"]
            slow += ["burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES)]
            _tool("tc", "qdisc", "add", "dev", link, *slow)
            _tool("tc", *inside, "qdisc", "add", "dev", "eth0", *slow)
        if not os.path.isdir("/run/sshd"):
            os.mkdir("/run/sshd")
            self._made_run_sshd = True
        self._sshds.append(
            subprocess.Popen(
                [*self._as_host(name), SSHD, "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stderr=(self._folder / f"sshd.{name}.log").open("wb"),
            )
        )

    def _wait_for_sshd(self) -> None:
        deadline = time.monotonic() + 15
        for name in self.names:
            key = str(self._folder / "user_key")
            options = ["-p", str(SSH_PORT), "-i", key, "-o", "BatchMode=yes"]
            while True:
                ssh = self.popen(["ssh", *options, name, "true"])
                said, _ = ssh.communicate(timeout=20)
                if ssh.returncode == 0:
                    break
                if time.monotonic() > deadline:
                    raise LaunchError(f"sshd on {name} does not answer: {said}")
                time.sleep(0.1)


def remove_left_hosts() -> None:
    """Removes hosts whose process is no more: it was killed, and could not do it."""
    names = set(re.findall(r"^(kmg\d+-\S+)", _told("ip", "netns", "list"), re.M))
    links = re.findall(r"^\d+: (kmg\d+(?:br|v\d+))\b", _told("ip", "-o", "link"), re.M)
    for name in sorted(names):
        if _is_left(name):
            _end_all(name)
            _remove(name)
    for link in links:
        if _is_left(link):
            _ip("link", "del", link, check=False)


def _is_left(name: str) -> bool:
    found = re.match(r"kmg(\d+)", name)
    return found is not None and not os.path.exists(f"/proc/{found[1]}")


def _end_all(namespace: str) -> None:
    for pid in VirtualHosts.pids(namespace):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _remove(namespace: str) -> None:
    _ip("netns", "del", namespace, check=False)
    shutil.rmtree(f"/etc/netns/{namespace}", ignore_errors=True)


def _told(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def _ip(*arguments: str, check: bool = True) -> None:
    _tool("ip", *arguments, check=check)


def _tool(*command: str, check: bool = True) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if check and result.returncode:
        raise LaunchError(f"`{' '.join(command)}` failed: {result.stderr.strip()}")
