"""Sweeps on a Ray cluster of two node processes, on loopback addresses of this machine.

Run as a process of its own: ``python -m tests.hc_lens.sweeps.ray_cluster CONFIG FOLDER STORE...``.
Each node has a home, a temporary and a working folder of its own below FOLDER. Does the sweep for
each store, kills a node in the middle of the last one, and says what happened as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray.cluster_utils import Cluster

from hc_lens.errors import HcLensError
from hc_lens.records import Records
from hc_lens.sweeps.config import SweepConfig
from hc_lens.sweeps.engines import Ray
from hc_lens.sweeps.runs import KIND, RUNS
from hc_lens.sweeps.sweep import sweep

# Ray puts the machine's own address in the place of 127.0.0.1, but not of these.
HEAD, OTHER = "127.0.0.2", "127.0.0.3"
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
WAIT = 60.0


def running(node: Any) -> int:
    """How many worker processes of a node are in a task of the sweep; Ray names them so."""
    raylet = str(node.all_processes["raylet"][0].process.pid)
    count = 0
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = (place / "stat").read_text().rpartition(")")[2].split()[1]
            name = (place / "cmdline").read_text()
        except OSError:  # it ended while we looked
            continue
        count += parent == raylet and name.startswith("ray::perform")
    return count


def begun(store: str) -> int:
    """How many runs a store has, if there is one."""
    with contextlib.suppress(HcLensError):
        return len(Records.existing(store, KIND).names(RUNS))
    return 0


def add(cluster: Cluster, folder: Path, **settings: Any) -> Any:
    """Add a node that has its folders to itself."""
    folder.mkdir()
    before = Path.cwd()
    os.chdir(folder)
    try:
        own = {"HOME": str(folder), "TMPDIR": str(folder)}
        return cluster.add_node(**NODE, **settings, env_vars=own)
    finally:
        os.chdir(before)


def kill_in_the_middle(cluster: Cluster, node: Any, store: str, said: dict) -> None:
    """Kill a node that is in the middle of a task, when the first runs are finished."""
    limit = time.monotonic() + WAIT
    while time.monotonic() < limit:
        said["tasks_at_kill"] = running(node)
        if begun(store) >= 2 and said["tasks_at_kill"]:
            break
        time.sleep(0.02)
    cluster.remove_node(node, allow_graceful=False)
    said["runs_at_kill"] = begun(store)


def alive(expected: int) -> int:
    """Number of living nodes; waits until the cluster has noticed a death."""
    limit = time.monotonic() + WAIT
    while time.monotonic() < limit:
        count = sum(item["Alive"] for item in ray.nodes())
        if count == expected:
            break
        time.sleep(0.2)
    return count


def main() -> None:
    config, folder = SweepConfig.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2])
    *whole, last = sys.argv[3:]
    said: dict = {}
    system = {
        # Processes that wait for the second sweep are kept, so that both nodes are in it at once.
        "idle_worker_killing_time_threshold_ms": 600_000,
        # A dead node is noticed in seconds, where the default takes about half a minute.
        "health_check_period_ms": 1000,
        "health_check_failure_threshold": 3,
    }
    cluster = Cluster()
    add(cluster, folder / "head", node_ip_address=HEAD, _system_config=system)
    node = add(cluster, folder / "other", node_ip_address=OTHER)
    ray.init(address=cluster.address, _node_ip_address=HEAD, log_to_driver=False)
    said["nodes"] = alive(2)

    @ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
    def where() -> str:
        time.sleep(0.5)
        assert os.environ["HOME"] == os.environ["TMPDIR"] == os.getcwd()
        return os.getcwd()

    said["folders"] = sorted(set(ray.get([where.remote() for _ in range(6)])))
    done = [sweep(config, store, engine="ray", progress=False) for store in whole]
    said["finished"] = [len(runs.subnetworks) for runs in done]
    killer = threading.Thread(target=kill_in_the_middle, args=(cluster, node, last, said))
    killer.start()
    killed = sweep(config, last, engine=Ray(retries=5), progress=False)
    killer.join()
    said["same"] = all(killed.table.equals(runs.table) for runs in done)
    said["finished_after_kill"], said["failed_after_kill"] = (
        len(killed.subnetworks),
        killed.failed["why"].tolist(),
    )
    said["nodes_after_kill"] = alive(1)
    ray.shutdown()
    cluster.shutdown()
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
