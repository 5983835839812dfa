"""Objects in a bucket of S3 or a compatible store, by s3fs requests that `RetryPolicy` retries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from mingpt_ddp.storage import remote
from mingpt_ddp.storage.remote import RemoteFiles, RetryPolicy, describe, http_status_and_code, in_parallel, redact

log = logging.getLogger(__name__)

MAX_PARTS = 10_000  # of one multipart upload


class S3Files(RemoteFiles):
    """The objects of a bucket, which has to exist: no request here creates it."""

    def __init__(self, fs: Any) -> None:
        super().__init__(fs)
        fs.retries = 1  # only `RetryPolicy` retries, until the deadline

    def _target(self, path: str) -> dict[str, str]:
        bucket, key, _ = self.fs.split_path(path)
        return {"Bucket": bucket, "Key": key}

    async def _write(self, retry: RetryPolicy, path: str, content: memoryview) -> None:
        if len(content) <= remote.PART:
            body = bytes(content)
            await retry(lambda: self.fs._call_s3("put_object", **self._target(path), Body=body), len(body))
            return
        try:
            await self._upload(retry, path, content)
        except FileNotFoundError as error:
            if http_status_and_code(error)[1] != "NoSuchUpload":
                raise
            # The store lost the upload, or completed it and the answer was lost: uploading again is right either way.
            await self._upload(retry, path, content)

    async def _upload(self, retry: RetryPolicy, path: str, content: memoryview) -> None:
        """Send a large object as a multipart upload, which becomes visible with its last request."""
        call, target = self.fs._call_s3, self._target(path)
        size = max(remote.PART, -(-len(content) // MAX_PARTS))
        upload = (await retry(lambda: call("create_multipart_upload", **target)))["UploadId"]

        async def send(number: int) -> dict[str, Any]:
            body = bytes(content[(number - 1) * size : number * size])
            request = partial(call, "upload_part", **target, UploadId=upload, PartNumber=number, Body=body)
            return {"PartNumber": number, "ETag": (await retry(request, len(body)))["ETag"]}

        try:
            parts = {"Parts": await in_parallel([partial(send, i + 1) for i in range(-(-len(content) // size))])}
            complete = partial(call, "complete_multipart_upload", **target, UploadId=upload, MultipartUpload=parts)
            await retry(complete, len(content))
        except BaseException:
            await self._abort(target["Bucket"], [(target["Key"], upload)])
            raise

    async def _abort(self, bucket: str, uploads: Sequence[tuple[str, str]]) -> None:
        """Abort multipart uploads, which deletes their parts; after an error they stay until `delete` tries again."""
        retry = RetryPolicy()
        for key, upload in uploads:
            request = partial(self.fs._call_s3, "abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)
            try:
                await asyncio.wait_for(retry(request), remote.REQUEST_TIMEOUT_S)
            except Exception as error:
                log.debug("cannot abort an unfinished upload: %s", redact(describe(error)))

    async def _put_if_absent(self, path: str, content: memoryview) -> None:
        put = partial(self.fs._call_s3, "put_object", **self._target(path), Body=bytes(content))
        try:
            await put(IfNoneMatch="*")
        except OSError as error:
            status, code = http_status_and_code(error)
            if status == 412 or code == "PreconditionFailed":
                raise FileExistsError(path) from error
            if status != 501:
                raise
            await put()  # a store without conditional writes

    async def _delete(self, retry: RetryPolicy, path: str) -> None:
        """Delete each object with a request of its own, since the request for many reports no failure."""
        names = await retry(lambda: self.fs._find(path))
        requests = [partial(self.fs._call_s3, "delete_object", **self._target(name)) for name in names]
        await in_parallel([partial(retry, request) for request in requests])
        # Uploads of a process that was killed: their parts are in no listing, but they are paid for.
        bucket, key = self._target(path).values()
        try:
            request = partial(self.fs._call_s3, "list_multipart_uploads", Bucket=bucket, Prefix=key)
            listed = (await retry(request)).get("Uploads", [])
        except Exception as error:  # listing uploads takes a permission that not everybody has
            log.debug("cannot list unfinished uploads: %s", redact(describe(error)))
            return
        below = [(upload["Key"], upload["UploadId"]) for upload in listed]
        await self._abort(bucket, [(name, upload) for name, upload in below if f"{name}/".startswith(f"{key}/")])
