"""The runs on a real Ray cluster of two workers: the numbers of one machine, and a worker that is killed."""

import os
import shutil
import signal
import socket
import sys
import threading
from dataclasses import replace

import pytest

from locant.experiments import own_code, ray_cluster
from locant.experiments.comparison import DATA, open_folder, where
from locant.runs import files, run_folder
from tests.experiments.processes import PAUSE, STEPS, assert_same, pausing_once_on_ray

ray = pytest.importorskip("ray", reason="ray is an extra: pip install 'locant[ray]'")

from locant.experiments.ray_cluster import RayCluster, _check_address, _timed  # noqa: E402


@pytest.fixture(scope="module")
def cluster():
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False,
        logging_level="ERROR",
    )  # fmt: skip
    yield RayCluster("local", 1)
    ray.shutdown()


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_is_replaced_and_the_numbers_are_those_of_one_machine(
    cluster, whole, tmp_path, monkeypatch
):
    assert cluster.slots == 2
    monkeypatch.setattr(ray_cluster, "_do_run", pausing_once_on_ray)  # so that it cannot end before it is killed
    chosen = [run for run in open_folder(whole).runs() if run.scheme in ("native", "tisa")]
    runs = [(run, where(tmp_path, run)) for run in chosen]
    victim, killed = next(here for run, here in runs if run.scheme == "tisa"), 0
    for _ in cluster.work(runs, whole / DATA):
        if not killed and len(files.lines(victim / run_folder.METRICS)) == PAUSE:
            killed = files.read_json(victim / "run.json")["process"]
            os.kill(killed, signal.SIGKILL)
    assert killed
    assert killed != os.getpid()
    for run, here in runs:
        assert_same(here, where(whole, run))
        assert not (here / run_folder.FAILED).exists()
    # Its steps were written twice, the second time from a checkpoint on; they are there once.
    assert [row["step"] for row in files.lines(victim / run_folder.METRICS) if row["kind"] == "step"] == [
        *range(1, STEPS + 1)
    ]


@pytest.mark.slow
def test_a_step_is_timed_on_the_cluster_also_with_a_scheme_of_the_user(cluster, whole, tmp_path):
    work, whole_machine = open_folder(whole).work, RayCluster("local", 2)
    assert whole_machine.slots == 1
    shutil.copytree(whole / DATA, tmp_path / DATA)
    (tmp_path / own_code.FOLDER).mkdir()
    (tmp_path / own_code.FOLDER / "mine.py").write_text("from locant.schemes import Nope\nclass Mine(Nope): pass\n")
    own = replace(work, imports=("mine.py",))
    assert 0 < whole_machine.seconds_of_a_step(own, "mine", tmp_path / DATA) < 60
    assert _timed(work, "nothing", whole / DATA).startswith("nothing cannot be trained on ")


@pytest.mark.slow
def test_a_folder_that_is_not_shared(cluster, whole, tmp_path):
    run = open_folder(whole).runs()[0]
    with pytest.raises(OSError, match="must share the output folder"):
        for _ in cluster.work([(run, tmp_path / "run")], tmp_path / "elsewhere"):
            pass


def test_a_real_cluster_answers(cluster):
    _check_address(ray.get_runtime_context().gcs_address)


def test_runs_that_fit_on_no_machine_are_refused(cluster):
    with pytest.raises(ValueError, match="no machine of the Ray cluster at local has the 64 CPUs"):
        RayCluster("local", 64)


# These need no cluster.
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "no Ray cluster at 127.0.0.1:1: .*refused"),
        ("ray://127.0.0.1:1", "the address of a Ray cluster must be host:6379, auto or local"),
        ("http://", "the address of a Ray cluster must be host:6379"),
    ],
)
def test_a_cluster_that_is_not_there(address, words, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises((ConnectionError, ValueError), match=words):
        RayCluster(address, 1)


def test_a_cluster_that_refuses_access(monkeypatch):
    def refusing(**options):
        raise ConnectionError("Failed to connect") from RuntimeError("Traceback:\n  …\nthe token is missing\n")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refusing)
    with pytest.raises(ConnectionError, match=r"no Ray cluster at auto: the token is missing$"):
        RayCluster("auto", 1)


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silence", "a web server"])
def test_something_else_at_the_address(answer, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr("locant.experiments.ray_cluster.PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if answer:

            def serve() -> None:
                connection, _ = server.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(answer)

            threading.Thread(target=serve).start()
        with pytest.raises(ConnectionError, match="another kind of server answers there" if answer else "timed out"):
            RayCluster(address, 1)


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'locant\[ray\]'"):
        RayCluster("auto", 1)
