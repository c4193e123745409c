"""`bench --tune` and `run --settings`: the search, and files that are refused."""

from __future__ import annotations

import json
import os

import pytest
from launching import no_job_outlives_its_test, python, run

from kerasmgpu.cli import main
from kerasmgpu.perf import blocks, tuning
from kerasmgpu.perf.settings import Settings, fingerprint, read_settings, write_settings

__all__ = ["no_job_outlives_its_test"]


def test_the_search_keeps_what_is_faster_and_nothing_else():
    asked = []

    def measure(settings):
        asked.append(settings)
        rate = 100.0
        if settings.environment.get("HOROVOD_CYCLE_TIME") == "5":
            rate *= 1.5
        if settings.environment.get("KERASMGPU_PIN_CORES") == "0":
            rate *= 1.01  # within the noise
        if settings.environment.get("OMPI_MCA_smsc") == "^cma":
            rate *= 0.9
        return 0.0 if settings.gloo else rate

    best, trials = tuning.search(measure, rounds=2, threads=4, tell=lambda what: None)
    assert best == Settings({"HOROVOD_CYCLE_TIME": "5"})
    assert [trial.what for trial in trials if trial.kept] == ["HOROVOD_CYCLE_TIME=5"]
    gloo = trials[-1]
    assert (gloo.what, gloo.gains) == ("--gloo", [0.0, 0.0])
    assert any("TF_NUM_INTRAOP_THREADS" in s.environment for s in asked)
    # Later trials stand on what was kept.
    assert asked[-1].environment == {"HOROVOD_CYCLE_TIME": "5"}


def test_a_gain_in_one_round_only_is_noise():
    rates = iter([100.0, 150.0, 100.0, 100.0] + [100.0] * 100)
    best, _ = tuning.search(lambda s: next(rates), 2, 1, lambda what: None)
    assert best == Settings({})


def test_settings_reach_the_ranks_and_the_users_own_win(tmp_path):
    path = tmp_path / "settings.json"
    write_settings(path, Settings({"HOROVOD_CYCLE_TIME": "3", "TF_X": "file"}))
    show = python("print(os.environ['HOROVOD_CYCLE_TIME'], os.environ['TF_X'])")
    ended = run("-np", "2", "--settings", str(path), *show, env={"TF_X": "mine"})
    assert "[1] 3 mine" in ended.out


def changed(**changes):
    made = {"kind": "kerasmgpu settings", "made_for": fingerprint()}
    made |= {"environment": {}, "gloo": False}
    return {k: v for k, v in {**made, **changes}.items() if v is not None}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("{", "cannot be read"),
        (["other"], "Expected a settings file"),
        (changed(environment=None), "lacks the field 'environment'"),
        (changed(gloo="no"), "lacks the field 'gloo'"),
        (
            changed(made_for={**fingerprint(), "cores": "96"}),
            "another machine or version: cores is",
        ),
        (
            changed(made_for={**fingerprint(), "kerasmgpu": "9.9"}),
            "and '9.9' there",
        ),
    ],
)
def test_settings_of_another_machine_or_version_are_refused(
    made, message, tmp_path, capfd
):
    path = tmp_path / "settings.json"
    path.write_text(made if isinstance(made, str) else json.dumps(made))
    assert main(["run", "-np", "2", "--settings", str(path), "--", "true"]) == 2
    said = capfd.readouterr().err
    assert message in said
    assert "kerasmgpu bench --tune FILE" in said


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a rank a core is tuned")
def test_tuning_writes_what_run_takes(tmp_path, monkeypatch, capfd):
    def ranks(self, count, batch_size, environ, gloo):
        fast = environ.get("HOROVOD_CYCLE_TIME") == "1"
        return [{"samples_per_second": 200.0 if fast else 100.0}] * count

    monkeypatch.setattr(blocks.Blocks, "ranks", ranks)
    path = tmp_path / "settings.json"
    assert main(["bench", "--tune", str(path), "--np", "2", "--rounds", "2"]) == 0
    assert "HOROVOD_CYCLE_TIME=1" in capfd.readouterr().out
    assert read_settings(path) == Settings({"HOROVOD_CYCLE_TIME": "1"})
    assert json.loads(path.read_text())["num_ranks"] == 2
