"""Jobs start after their needs and restart after a lost worker, also on Ray and submitit, with the same bytes."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from support.forked import forked
from support.forked_interpreters import forked_interpreters
from support.lost_jobs import ended
from support.tiny_study import TINY, AtOnce

from avalanche_amnesia.lab.executors import ProcessExecutor
from avalanche_amnesia.lab.executors.clusters import RayExecutor, SlurmExecutor
from avalanche_amnesia.lab.executors.jobs import Job, NeedFailedError, run_jobs
from avalanche_amnesia.lab.runs import RunStore
from avalanche_amnesia.lab.study.experiment import cells_of, folder_of
from avalanche_amnesia.lab.study.sweep import jobs_of, sweep


def named(name):
    return name


def failing(name):
    raise ValueError(f"{name} can't")


def job(name, *needs, function=named):
    return Job(name, function, (name,), frozenset(needs))


def test_needs_run_first_and_every_end_is_reported():
    executor, told = AtOnce(), []
    jobs = [job("c", "a", "b"), job("b", "a"), job("a"), job("d")]
    assert run_jobs(jobs, executor, on_done=lambda job, *rest: told.append((job.name, *rest))) == {}
    order = [name for (name,) in executor.calls]
    assert sorted(order) == ["a", "b", "c", "d"]
    assert order.index("a") < order.index("b") < order.index("c")
    assert told == [("a", "a", 3), ("d", "d", 2), ("b", "b", 1), ("c", "c", 0)]


def test_few_workers_take_jobs_in_the_order_of_the_list():
    jobs = [job("a"), job("b"), job("c", "a", "b"), job("d"), job("e", "d")]
    few, many = AtOnce(workers=1), AtOnce()
    assert run_jobs(jobs, few) == run_jobs(jobs, many) == {}
    assert [name for (name,) in few.calls] == ["a", "b", "c", "d", "e"]
    assert [name for (name,) in many.calls][:3] == ["a", "b", "d"]
    assert run_jobs([job("a", function=failing), *jobs[1:]], AtOnce(["a"], workers=1)).keys() == {"a", "c"}


def test_jobs_that_need_a_failed_job_do_not_run_and_the_rest_does():
    executor = AtOnce()
    failed = run_jobs([job("a", function=failing), job("b", "a"), job("c", "b"), job("d")], executor)
    assert isinstance(failed["a"], ValueError)
    assert isinstance(failed["b"], NeedFailedError)
    assert "a failed" in str(failed["b"])
    assert isinstance(failed["c"], NeedFailedError)
    assert [name for (name,) in executor.calls] == ["a", "d"]


def test_a_job_is_restarted_at_most_as_often_as_allowed_if_its_worker_is_lost():
    for losses, fails in ((2, set()), (3, {"a", "b"})):
        executor = AtOnce(["a"] * losses)
        assert set(run_jobs([job("a"), job("b", "a")], executor, retries=2)) == fails
        assert executor.calls.count(("a",)) == 3


@pytest.mark.slow
def test_a_killed_process_is_replaced(tmp_path):
    executor, told = ProcessExecutor(1), []
    try:
        jobs = [Job("killed", ended, (str(tmp_path / "mark"), 1)), Job("after", time.sleep, (0,), {"killed"})]
        with forked_interpreters():
            assert run_jobs(jobs, executor, on_done=lambda job, result, n_left: told.append(result)) == {}
    finally:
        executor.close()
    assert told[0] != os.getpid()


def test_gpus_are_divided_among_workers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="no GPU"):
        ProcessExecutor(gpus=0.5)
    with pytest.raises(ValueError, match="0 to 1"):
        ProcessExecutor(gpus=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ProcessExecutor(gpus=0.25).workers == 8
    assert ProcessExecutor(3, gpus=0.25).workers == 3
    with pytest.raises(ValueError, match="workers must be an int of at least 1"):
        ProcessExecutor(0)


def noting_whose_process(folder):
    (folder / str(os.getpid())).touch()
    time.sleep(60)


def begin_two(folder):
    with forked_interpreters():
        run_jobs([Job(n, noting_whose_process, (folder,)) for n in ("a", "b")], ProcessExecutor(workers=2))


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks up processes as Linux shows them")
def test_workers_end_with_a_program_that_is_killed(tmp_path):
    program = forked(begin_two, tmp_path)
    deadline = time.monotonic() + 60
    while len(found := list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = [int(file.name) for file in found]
    assert len(workers) == 2
    assert all(map(runs, workers))
    program.kill()
    deadline = time.monotonic() + 3
    while any(map(runs, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(runs, workers))


CELLS = cells_of(TINY, scenarios=["newest"], seeds=[1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Results of a sweep in this process by run, and the keys of its store."""
    folder = tmp_path_factory.mktemp("alone")
    assert sweep(CELLS, AtOnce(), folder / "out", folder / "store") == {}
    return results(folder / "out"), keys(folder / "store")


def results(out):
    return {cell.method + cell.scenario: (folder_of(cell, out) / "results.csv").read_bytes() for cell in CELLS}


def keys(store):
    return {node.key for node in RunStore(store).nodes()}


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes of one core each, on this machine."""
    ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "avalanche-amnesia[ray]"')
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    small = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    cluster.add_node(**small)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def lose(cluster, store, lost, stop):
    """After the first states are written, kill the workers of one node, then remove the node."""
    while len(list((store / "nodes").glob("*"))) < 3 and not stop.is_set():
        time.sleep(0.05)
    worker = next(node for node in cluster.list_all_nodes() if not node.head)
    while not lost and not stop.is_set():  # the node may have no worker yet
        with suppress(psutil.NoSuchProcess):  # one that has just ended
            for process in psutil.Process(dict(worker.live_processes())["raylet"].pid).children():
                if "train_references" in " ".join([process.name(), *process.cmdline()]):
                    process.send_signal(signal.SIGKILL)
                    lost.append(process.pid)
    time.sleep(1)
    cluster.remove_node(worker, allow_graceful=False)
    lost.append("node")


@pytest.mark.slow
def test_a_ray_cluster_that_loses_workers_and_a_node_gives_the_same_bytes(cluster, alone, tmp_path):
    stop, lost = threading.Event(), []
    killer = threading.Thread(target=lose, args=(cluster, tmp_path / "store", lost, stop))
    executor = RayExecutor(cluster.address)
    killer.start()
    try:
        assert sweep(CELLS, executor, tmp_path / "out", tmp_path / "store") == {}
    finally:
        stop.set()
        killer.join()
        executor.close()
    assert lost[0] != lost[-1] == "node"  # a worker died in the middle of its job, then its node
    assert (results(tmp_path / "out"), keys(tmp_path / "store")) == alone


@pytest.fixture
def local(tmp_path, monkeypatch):
    """submitit's local executor."""
    pytest.importorskip("submitit", reason='submitit is not installed: pip install "avalanche-amnesia[slurm]"')
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # where their jobs are found
    monkeypatch.setattr("submitit.core.core.Job._results_timeout_s", 1)  # by default a lost job is waited for 15 s
    executor = SlurmExecutor(tmp_path / "logs", workers=2, cluster="local", parameters={"timeout_min": 5})
    with forked_interpreters():
        yield executor
    executor.close()


@pytest.mark.slow
def test_submitit_gives_the_same_bytes_restarts_lost_jobs_and_reports_failed_ones(local, alone, tmp_path):
    cell = CELLS[1]
    jobs = [Job("lost", ended, (str(tmp_path / "marks"), 1)), Job("wrong", int, ("x",))]
    failed = run_jobs([*jobs, *jobs_of([cell], tmp_path / "out", tmp_path / "store")], local)
    assert set(failed) == {"wrong"}
    assert "invalid literal" in str(failed["wrong"])
    assert len(list((tmp_path / "marks").iterdir())) == 1
    assert (folder_of(cell, tmp_path / "out") / "results.csv").read_bytes() == alone[0][cell.method + cell.scenario]


def test_slurm_refuses_shares_of_gpus_and_a_machine_without_slurm(tmp_path, monkeypatch):
    pytest.importorskip("submitit", reason='submitit is not installed: pip install "avalanche-amnesia[slurm]"')
    with pytest.raises(ValueError, match="whole GPUs"):
        SlurmExecutor(tmp_path, gpus=0.5, cluster="local")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match=r"there is no Slurm here \(no srun\)"):
        SlurmExecutor(tmp_path)


def test_a_missing_extra_is_named(monkeypatch):
    for name, extra, make in (("ray", "ray", RayExecutor), ("submitit", "slurm", lambda: SlurmExecutor(Path("logs")))):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=rf"avalanche-amnesia\[{extra}\]"):
            make()
