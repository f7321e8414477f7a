"""A local S3-compatible server: a process bound to the loopback address, on a port that the system chooses."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pyarrow.fs import FileSystem

_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "someone",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


_SERVER = """
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.port, flush=True)
server.serve_forever()
"""


@contextmanager
def start_s3_server() -> Iterator[str]:
    """Start a server with the bucket `shelf` and yield the query of its URIs, as in s3://shelf/folder?<query>."""
    old_values = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    command = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            query = f"scheme=http&endpoint_override=127.0.0.1:{int(server.stdout.readline())}"
            files, _ = FileSystem.from_uri(f"s3://shelf?{query}&allow_bucket_creation=true")
            files.create_dir("shelf")
            yield query
        finally:
            server.terminate()
    for name, value in old_values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
