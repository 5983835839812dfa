"""Messages of libraries, without the credentials that URLs in them hold."""

import pytest

from mingpt_ddp.storage.remote.remote_errors import redact


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("https://me:secret@host/api is away", "https://***@host/api is away"),
        ("https://me:sec@ret@host/api is away", "https://***@host/api is away"),
        ("https://host/x and a@b", "https://host/x and a@b"),
        ("https://host/x?X-Amz-Signature=secret&y=1 is away", "https://host/x?*** is away"),
    ],
)
def test_no_credentials(text, redacted):
    assert redact(text) == redacted
