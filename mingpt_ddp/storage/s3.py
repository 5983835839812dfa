"""Objects in a bucket of S3 and its relatives, by the requests that `remote` lets try again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from mingpt_ddp.storage import remote
from mingpt_ddp.storage.remote import RemoteFiles, RetryPolicy, describe, http_status_and_code, in_parallel, redact

log = logging.getLogger(__name__)

MAX_PARTS = 10_000  # of one upload


class S3Files(RemoteFiles):
    """The objects of a bucket, which has to exist: no request here makes one."""

    def __init__(self, fs: Any, url: str) -> None:
        super().__init__(fs, url)
        fs.retries = 1  # `RetryPolicy` does it, within the budget

    def _place(self, path: str) -> dict[str, str]:
        bucket, key, _ = self.fs.split_path(path)
        return {"Bucket": bucket, "Key": key}

    async def _write(self, attempt: RetryPolicy, path: str, content: memoryview) -> None:
        if len(content) <= remote.PART:
            body = bytes(content)
            await attempt(lambda: self.fs._call_s3("put_object", **self._place(path), Body=body), len(body))
            return
        try:
            await self._upload(attempt, path, content)
        except FileNotFoundError as error:
            if http_status_and_code(error)[1] != "NoSuchUpload":
                raise
            # The store lost it, or has completed it and the answer was lost: a second upload is right in both cases.
            await self._upload(attempt, path, content)

    async def _upload(self, attempt: RetryPolicy, path: str, content: memoryview) -> None:
        """Send a large object part by part; without the last request nobody sees any of it."""
        call, place = self.fs._call_s3, self._place(path)
        size = max(remote.PART, -(-len(content) // MAX_PARTS))
        upload = (await attempt(lambda: call("create_multipart_upload", **place)))["UploadId"]

        async def send(number: int) -> dict[str, Any]:
            body = bytes(content[(number - 1) * size : number * size])
            request = partial(call, "upload_part", **place, UploadId=upload, PartNumber=number, Body=body)
            return {"PartNumber": number, "ETag": (await attempt(request, len(body)))["ETag"]}

        try:
            parts = {"Parts": await in_parallel([partial(send, i + 1) for i in range(-(-len(content) // size))])}
            complete = partial(call, "complete_multipart_upload", **place, UploadId=upload, MultipartUpload=parts)
            await attempt(complete, len(content))
        except BaseException:
            await self._abort(place["Bucket"], [(place["Key"], upload)])
            raise

    async def _abort(self, bucket: str, uploads: Sequence[tuple[str, str]]) -> None:
        """Drop the parts of uploads that nobody will complete, as far as that is possible now; `delete` tries again."""
        attempt = RetryPolicy()
        for key, upload in uploads:
            request = partial(self.fs._call_s3, "abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)
            try:
                await asyncio.wait_for(attempt(request), remote.REQUEST_TIMEOUT_S)
            except Exception as error:
                log.debug("an unfinished upload stays: %s", redact(describe(error)))

    async def _put_if_absent(self, path: str, content: memoryview) -> None:
        put = partial(self.fs._call_s3, "put_object", **self._place(path), Body=bytes(content))
        try:
            await put(IfNoneMatch="*")
        except OSError as error:
            status, code = http_status_and_code(error)
            if status == 412 or code == "PreconditionFailed":
                raise FileExistsError(path) from error
            if status != 501:
                raise
            await put()  # a store without conditional writes

    async def _delete(self, attempt: RetryPolicy, path: str) -> None:
        """One request for each object: that for many at once reports no failure."""
        names = await attempt(lambda: self.fs._find(path))
        requests = [partial(self.fs._call_s3, "delete_object", **self._place(name)) for name in names]
        await in_parallel([partial(attempt, request) for request in requests])
        # What a killed process was uploading below this name: nobody sees the parts, but they are paid for.
        place = self._place(path)
        bucket, key = place["Bucket"], place["Key"]
        try:
            request = partial(self.fs._call_s3, "list_multipart_uploads", Bucket=bucket, Prefix=key)
            listed = (await attempt(request)).get("Uploads", [])
        except Exception as error:  # it takes a permission that not everybody has
            log.debug("cannot look for unfinished uploads: %s", redact(describe(error)))
            return
        below = [(upload["Key"], upload["UploadId"]) for upload in listed]
        await self._abort(bucket, [(name, upload) for name, upload in below if f"{name}/".startswith(f"{key}/")])
