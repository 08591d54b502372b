"""Two raylets on 127.0.0.1, until standard input is closed: python -m tests.ray.two_raylets."""

import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(
            node_ip_address="127.0.0.1",
            num_cpus=2,
            resources={"trainer": 1, "server": 1},
            object_store_memory=100_000_000,
            include_dashboard=False,
        )
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()
