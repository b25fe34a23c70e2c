"""The runs on a real Ray cluster of two workers: the numbers of one machine, and a worker that is killed."""

import os
import signal
import socket
import sys

import pytest

from locant.experiments.comparison import DATA, where
from locant.experiments.workers import LocalWorkers
from locant.runs import files, run_folder
from tests.experiments.test_survival import STEPS, assert_same, compared

ray = pytest.importorskip("ray", reason="ray is an extra: pip install 'locant[ray]'")

from locant.experiments.ray_cluster import RayCluster, _check_address, _timed  # noqa: E402


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False,
        logging_level="ERROR",
    )  # fmt: skip
    yield RayCluster("local", 1)
    ray.shutdown()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    out = tmp_path_factory.mktemp("ray") / "out"
    return out, compared(out, ["native", "tisa"])


def test_a_worker_killed_in_the_middle_is_replaced_and_the_numbers_are_those_of_one_machine(cluster, comparison):
    out, compared = comparison
    assert cluster.slots == 2
    runs = [(run, where(out, run)) for run in compared.runs()]
    victim, killed = where(out, compared.runs()[1]), 0
    for _ in cluster.work(runs, out / DATA):
        if not killed and len(files.lines(victim / run_folder.METRICS)) > STEPS // 3:
            killed = files.read_json(victim / "run.json")["process"]
            os.kill(killed, signal.SIGKILL)
    assert killed
    assert killed != os.getpid()

    alone = [(run, out / "alone" / run.name) for run in compared.runs()]
    for _ in LocalWorkers(1).work(alone, out / DATA):
        pass
    for (_, here), (_, undisturbed) in zip(runs, alone, strict=True):
        assert_same(here, undisturbed)
        assert not (here / run_folder.FAILED).exists()
    # Its steps were written twice, the second time from a checkpoint on; they are there once.
    assert [row["step"] for row in files.lines(victim / run_folder.METRICS) if row["kind"] == "step"] == [
        *range(1, STEPS + 1)
    ]


def test_a_step_is_timed_on_the_cluster(cluster, comparison):
    out, compared = comparison
    assert 0 < cluster.seconds_of_a_step(compared.work, "native", out / DATA) < 60
    assert _timed(compared.work, "nothing", out / DATA).startswith("nothing cannot be trained on ")


def test_a_folder_that_is_not_shared_is_said_to_be(cluster, comparison, tmp_path):
    _, compared = comparison
    with pytest.raises(OSError, match="must share the output folder"):
        for _ in cluster.work([(compared.runs()[0], tmp_path / "run")], tmp_path / "elsewhere"):
            pass


def test_a_real_cluster_answers(cluster):
    _check_address(ray.get_runtime_context().gcs_address)


def test_runs_that_fit_on_no_machine_are_refused(cluster):
    with pytest.raises(ValueError, match="no machine of the Ray cluster at local has the 64 CPUs"):
        RayCluster("local", 64)


# What is not there is asked for in processes without a cluster: these need none.
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


def test_a_cluster_that_lets_nobody_in_says_why(monkeypatch):
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
            import threading

            def serve() -> None:
                connection, _ = server.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(answer)

            threading.Thread(target=serve).start()
        with pytest.raises(ConnectionError, match="another kind of server answers there" if answer else "timed out"):
            RayCluster(address, 1)


def test_without_ray_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'locant\[ray\]'"):
        RayCluster("auto", 1)
