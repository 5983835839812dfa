"""Objects in a bucket of S3 or a compatible store, by s3fs's own requests, uploads in parts and retries."""

from contextlib import suppress
from functools import partial
from typing import Any

from mingpt_ddp.storage import remote
from mingpt_ddp.storage.remote import RemoteStorage, within
from mingpt_ddp.storage.storage import Content


class S3Storage(RemoteStorage):
    """A directory of a bucket, which has to exist: no request here creates it.

    What the store refuses for a moment, s3fs sends again, a part of a large object alone; after that, and where it does
    not retry, the whole operation starts again.
    """

    def __init__(self, url: str, root: str, fs: Any) -> None:
        from aiobotocore.httpsession import AIOHTTPSession
        from botocore.exceptions import ConnectionError as EndpointError
        from s3fs.core import S3_RETRYABLE_ERRORS

        super().__init__(url, root, fs)
        self.transient += (EndpointError, *S3_RETRYABLE_ERRORS)
        storage = self

        class Session(AIOHTTPSession):
            """Ends each request in time: no timeout of aiohttp's or botocore's holds while a request is sent."""

            async def send(self, request: Any) -> Any:
                end = storage.end_of_request(int(request.headers.get("Content-Length", remote.PART)))
                return await within(super().send(request), end)

        # As many retries as an unlucky part needs: an outage soon shows its error. botocore's are for 500, 502 and 504.
        fs.config_kwargs |= {"http_session_cls": Session, "retries": {"max_attempts": 1}}
        # Some servers (rclone) send the checksum of the whole object with a part; manifests have digests of their own.
        fs.config_kwargs |= {"response_checksum_validation": "when_required"}
        fs.retries, fs.max_concurrency = 3, remote.PARALLEL

    def write(self, name: str, content: Content) -> None:
        path, data = self._path(name), memoryview(content).cast("B")
        # S3 takes 10,000 parts at most; s3fs sends less than two of them in one request.
        chunk = max(remote.PART, -(-len(data) // 10_000))
        sliced = bytes(data) if len(data) < 2 * chunk else _Parts(data)
        send = partial(self._request, "write", path, "pipe_file", path, sliced, chunksize=chunk, size=len(data))
        try:
            send()
        except FileNotFoundError:
            # The store lost the upload, or completed it and the answer was lost: uploading again is right either way.
            send()
        finally:
            if isinstance(sliced, _Parts):
                self._abort_uploads(path)  # of attempts that were cancelled

    def delete(self, name: str) -> None:
        """Delete each object with a request of its own, since the request for many reports no failure."""
        path = self._path(name)
        for file in self._request("delete", path, "find", path):
            self._request("delete", file, "rm_file", file)
        bucket, key, _ = self.fs.split_path(path)
        # SeaweedFS would go on listing an empty directory.
        self._request("delete", path, "call_s3", "delete_object", Bucket=bucket, Key=f"{key}/")
        self._abort_uploads(path)

    def _abort_uploads(self, path: str) -> None:
        """Abort the multipart uploads at or below a path that a cancelled attempt or a killed process has left.

        Their parts are in no listing, but they are paid for.
        """
        bucket, key, _ = self.fs.split_path(path)
        request = partial(self._request, "abort uploads of", path, seconds=remote.REQUEST_TIMEOUT_S)
        with suppress(OSError):  # listing uploads takes a permission that not everybody has
            listed = request("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=key)
            for upload in listed.get("Uploads", []):
                if f"{upload['Key']}/".startswith(f"{key}/"):
                    request("abort_mpu", bucket, upload["Key"], upload["UploadId"])


class _Parts:
    """Content that is copied a part at a time: s3fs takes slices, and its requests need bytes."""

    def __init__(self, content: memoryview) -> None:
        self._content = content

    def __len__(self) -> int:
        return len(self._content)

    def __getitem__(self, part: slice) -> bytes:
        return bytes(self._content[part])
