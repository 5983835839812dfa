"""Read and write objects in an S3-compatible bucket, with the library s3fs."""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

from mingpt_ddp.storage.remote import remote
from mingpt_ddp.storage.remote.remote import RemoteStorage
from mingpt_ddp.storage.storage import Content


class S3Storage(RemoteStorage):
    """A directory in an existing bucket. No request creates a bucket.

    s3fs itself retries requests after some transient errors. If that does not help, or if s3fs does
    not retry, this class retries the whole operation.
    """

    def __init__(self, url: str, root: str, fs: Any) -> None:
        from aiobotocore.httpsession import AIOHTTPSession
        from botocore.exceptions import ConnectionError as EndpointError
        from s3fs.core import S3_RETRYABLE_ERRORS

        super().__init__(url, root, fs)
        self.transient += (EndpointError, *S3_RETRYABLE_ERRORS)

        class Session(AIOHTTPSession):
            """An HTTP session that times out each request, also while its content is being sent.

            The timeouts of aiohttp and botocore do not cover sending.
            """

            async def send(self, request: Any) -> Any:
                size = int(request.headers.get("Content-Length", remote.PART_BYTES))
                return await asyncio.wait_for(super().send(request), remote.request_timeout(size))

        # Let botocore and s3fs retry only a few times, so that our own retries notice an outage
        # soon. botocore retries after status 500, 502 and 504.
        fs.config_kwargs |= {"http_session_cls": Session, "retries": {"max_attempts": 1}}
        # Do not check the checksums in responses: some servers (rclone) send the checksum of the
        # whole object with each part. The manifest of a snapshot has SHA-256 hashes anyway.
        fs.config_kwargs |= {"response_checksum_validation": "when_required"}
        fs.retries = 3
        fs.max_concurrency = remote.CONCURRENT_PARTS

    def write(self, name: str, content: Content) -> None:
        path = self._path(name)
        data = memoryview(content).cast("B")
        # S3 allows 10,000 parts. s3fs sends anything smaller than two parts in one request.
        chunk = max(remote.PART_BYTES, -(-len(data) // 10_000))
        sliced = bytes(data) if len(data) < 2 * chunk else _Parts(data)
        send = partial(
            self._request, "write", path, "pipe_file", path, sliced, chunksize=chunk, size=len(data)
        )
        try:
            send()
        except FileNotFoundError:
            # Either the upload was lost, or the response that confirms it. Upload the file again.
            send()
        finally:
            if isinstance(sliced, _Parts):
                self._abort_uploads(path)  # a cancelled request leaves an unfinished upload

    def delete(self, name: str) -> None:
        """Delete objects one by one, because a bulk delete reports no failures."""
        path = self._path(name)
        for file in self._request("delete", path, "find", path):
            self._request("delete", file, "rm_file", file)
        bucket, key, _ = self.fs.split_path(path)
        # Without this request, SeaweedFS would go on listing the empty directory.
        self._request("delete", path, "call_s3", "delete_object", Bucket=bucket, Key=f"{key}/")
        self._abort_uploads(path)

    def _abort_uploads(self, path: str) -> None:
        """Abort unfinished multipart uploads at or below a path.

        Cancelled requests and killed processes leave such uploads. Their parts are not listed, but
        they are billed.
        """
        bucket, key, _ = self.fs.split_path(path)
        request = partial(self._request, "abort uploads of", path, seconds=remote.REQUEST_TIMEOUT_S)
        with suppress(OSError):  # the permission to list uploads may be missing
            listed = request("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=key)
            for upload in listed.get("Uploads", []):
                if f"{upload['Key']}/".startswith(f"{key}/"):
                    request("abort_mpu", bucket, upload["Key"], upload["UploadId"])


class _Parts:
    """Content that is copied in parts: s3fs slices it once for each request.

    This saves a copy of the whole content.
    """

    def __init__(self, content: memoryview) -> None:
        self._content = content

    def __len__(self) -> int:
        return len(self._content)

    def __getitem__(self, part: slice) -> bytes:
        return bytes(self._content[part])
