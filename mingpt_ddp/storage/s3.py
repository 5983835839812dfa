"""Objects in a bucket of S3 or a compatible store, by s3fs requests that `RetryPolicy` retries."""

import asyncio
import logging
from functools import partial
from typing import Any

from mingpt_ddp.storage import remote
from mingpt_ddp.storage.remote import RemoteStorage, RetryPolicy, describe, gather, http_status_and_code, redact

log = logging.getLogger(__name__)

MAX_PARTS = 10_000  # of one multipart upload


class S3Storage(RemoteStorage):
    """A directory of a bucket, which has to exist: no request here creates it.

    s3fs sends the requests, one at a time. Its own multipart upload is not used, because it sends the whole object
    again after a 500 or a lost answer, does not cancel the other parts after an error, and leaves them at a deadline.
    """

    def __init__(self, url: str, root: str, fs: Any) -> None:
        super().__init__(url, root, fs)
        fs.retries = 1  # only `RetryPolicy` retries, until the deadline

    async def _send(self, method: str, path: str, **arguments: Any) -> Any:
        bucket, key, _ = self.fs.split_path(path)
        return await self.fs._call_s3(method, Bucket=bucket, Key=key, **arguments)

    async def _write(self, retry: RetryPolicy, path: str, content: memoryview) -> None:
        if len(content) <= remote.PART:
            return await super()._write(retry, path, content)
        try:
            await self._upload(retry, path, content)
        except FileNotFoundError as error:
            if http_status_and_code(error)[1] != "NoSuchUpload":
                raise
            # The store lost the upload, or completed it and the answer was lost: uploading again is right either way.
            await self._upload(retry, path, content)

    async def _upload(self, retry: RetryPolicy, path: str, content: memoryview) -> None:
        """Send a large object as a multipart upload, which becomes visible with its last request."""
        size = max(remote.PART, -(-len(content) // MAX_PARTS))
        upload = (await retry(lambda: self._send("create_multipart_upload", path)))["UploadId"]

        async def send(number: int, part: memoryview) -> dict[str, Any]:
            sent = {"UploadId": upload, "PartNumber": number}
            answer = await retry(lambda: self._send("upload_part", path, Body=bytes(part), **sent), len(part))
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            starts = range(0, len(content), size)
            parts = await gather(send(i, content[start : start + size]) for i, start in enumerate(starts, 1))
            sent = {"UploadId": upload, "MultipartUpload": {"Parts": parts}}
            await retry(lambda: self._send("complete_multipart_upload", path, **sent), len(content))
        except BaseException:
            await self._abort(path, upload)
            raise

    async def _abort(self, path: str, upload: str) -> None:
        """Abort a multipart upload, which deletes its parts; after an error they stay until `delete` tries again."""
        request = RetryPolicy()(lambda: self._send("abort_multipart_upload", path, UploadId=upload))
        try:
            await asyncio.wait_for(request, remote.REQUEST_TIMEOUT_S)
        except Exception as error:
            log.debug("cannot abort an unfinished upload: %s", redact(describe(error)))

    async def _put_if_absent(self, path: str, content: bytes) -> None:
        try:
            await super()._put_if_absent(path, content)
        except OSError as error:
            status, code = http_status_and_code(error)
            if status == 412 or code == "PreconditionFailed":
                raise FileExistsError(path) from error
            if status != 501:
                raise
            await self._call("pipe_file", path, content)  # a store without conditional writes

    async def _delete(self, retry: RetryPolicy, path: str) -> None:
        """Delete each object with a request of its own, since the request for many reports no failure."""
        names = await retry(lambda: self.fs._find(path))
        await gather(retry(partial(self.fs._rm_file, name)) for name in names)
        # Uploads of a process that was killed: their parts are in no listing, but they are paid for.
        bucket, key, _ = self.fs.split_path(path)
        try:
            listed = await retry(lambda: self.fs._call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key))
        except Exception as error:  # listing uploads takes a permission that not everybody has
            log.debug("cannot list unfinished uploads: %s", redact(describe(error)))
            return
        for upload in listed.get("Uploads", []):
            if f"{upload['Key']}/".startswith(f"{key}/"):
                await self._abort(f"{bucket}/{upload['Key']}", upload["UploadId"])
