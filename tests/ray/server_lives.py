"""Kill a server's process, then its actor, then its process again. Prints its address and process id after each. This
is a program because its modules come from docs/launch, where Ray's workers look too."""

import os
import signal
import sys
import time
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from tiercel_ray import Part, Server, actor_of

STUB = """
import http.server, os, pathlib, sys
pathlib.Path("pid").write_text(str(os.getpid()))
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer((sys.argv[2], int(sys.argv[4])), Healthy).serve_forever()
"""


def gone(pid: int) -> None:
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.1)


if __name__ == "__main__":
    directory, port = Path(sys.argv[1]), int(sys.argv[2])
    ray.init(address="auto", log_to_driver=False)
    part = Part(count=1, each={"CPU": 0.5, "server": 1})
    group = placement_group([part.each])
    server = actor_of(Server, part, group, 0, max_restarts=-1, max_task_retries=-1).remote(
        [sys.executable, "-c", STUB], port, {"PWD": str(directory)}, 1
    )
    for kill_actor in (False, True, False, False):
        print(ray.get(server.url.remote()), pid := int((directory / "pid").read_text()), flush=True)
        stat = Path(f"/proc/{pid}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]) if kill_actor else pid, signal.SIGKILL)
        gone(pid)
    print(ray.get(server.url.remote()))
