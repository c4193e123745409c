"""`examples/cluster/`: what can be held about it without a cluster."""

from __future__ import annotations

import argparse
import subprocess

import yaml
from launching import ROOT

from kerasmgpu.cli import run as run_command

CLUSTER = ROOT / "examples" / "cluster"


def test_the_mpijob_starts_what_kerasmgpu_run_understands() -> None:
    job = yaml.safe_load((CLUSTER / "mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    replicas = job["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    program, subcommand, *arguments = launcher["command"]
    assert (program, subcommand) == ("kerasmgpu", "run")
    parser = argparse.ArgumentParser(exit_on_error=False)
    run_command.add_arguments(parser)
    args = parser.parse_args(arguments)
    assert args.hostfile == "/etc/mpi/hostfile"
    assert args.ssh_port == 2222
    script = args.command[-1]
    assert (ROOT / script).exists()
    pod = replicas["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    # Both sides agree with the image on where sshd listens.
    dockerfile = (CLUSTER / "Dockerfile").read_text()
    assert "'Port 2222'" in dockerfile
    assert container["command"][-1] in dockerfile
    assert container["image"] == launcher["image"]


def test_the_batch_script_is_sound() -> None:
    script = CLUSTER / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = script.read_text().splitlines()
    options = [line for line in lines if line.startswith("#SBATCH ")]
    # Slurm stops reading options at the first command.
    first_command = next(n for n, line in enumerate(lines) if line[:1] not in ("#", ""))
    assert all(lines.index(option) < first_command for option in options)
    assert any("--ntasks-per-node" in option for option in options)
