# SPDX-License-Identifier: Apache-2.0
"""Which exceptions tell of a service outside of the job that does not answer, and which only sound so."""

import pytest

from megascale_ops.controller.policy.services import is_of_a_service, says_so
from megascale_ops.schema.progress import RankError

AWAY = (
    ("ConnectionRefusedError", "[Errno 111] Connection refused"),
    ("socket.gaierror", "[Errno -3] Temporary failure in name resolution"),
    ("OSError", "[Errno 113] No route to host"),
    ("TimeoutError", "[Errno 110] Connection timed out"),
    ("urllib.error.URLError", "<urlopen error [Errno 111] Connection refused>"),
    ("urllib.error.URLError", "<urlopen error [Errno -2] Name or service not known>"),
    ("urllib.error.URLError", "<urlopen error timed out>"),
    ("urllib.error.HTTPError", "HTTP Error 503: Service Unavailable"),
    ("requests.exceptions.HTTPError", "502 Server Error: Bad Gateway for url: http://data/part-7"),
    (
        "requests.exceptions.ConnectionError",
        "HTTPConnectionPool(host='data', port=80): Max retries exceeded with url: /",
    ),
    ("requests.exceptions.ReadTimeout", "HTTPSConnectionPool(host='data', port=443): Read timed out."),
    ("urllib3.exceptions.MaxRetryError", "HTTPConnectionPool(host='data', port=80): Max retries exceeded"),
    ("httpx.ConnectError", "[Errno -2] Name or service not known"),
    ("httpx.HTTPStatusError", "Server error '503 Service Unavailable' for url 'http://data/'"),
    (
        "aiohttp.client_exceptions.ClientConnectorError",
        "Cannot connect to host data:80 ssl:default [Connect call failed]",
    ),
    ("botocore.exceptions.EndpointConnectionError", 'Could not connect to the endpoint URL: "http://minio:9000/b"'),
    ("botocore.exceptions.ClientError", "An error occurred (SlowDown) when calling the GetObject operation: later"),
    ("botocore.exceptions.ClientError", "An error occurred (503) when calling the HeadObject operation"),
    ("google.api_core.exceptions.ServiceUnavailable", "503 GET https://storage.googleapis.com/b: backend error"),
    ("huggingface_hub.errors.HfHubHTTPError", "504 Server Error: Gateway Time-out for url: https://hub/api"),
    ("psycopg2.OperationalError", 'connection to server at "db" (10.0.0.3), port 5432 failed: Connection refused'),
    (
        "sqlalchemy.exc.OperationalError",
        '(psycopg2.OperationalError) could not translate host name "db": Name or service',
    ),
    ("redis.exceptions.ConnectionError", "Error 111 connecting to cache:6379. Connection refused."),
    ("pymongo.errors.ServerSelectionTimeoutError", "mongo:27017: [Errno 111] Connection refused"),
    ("OSError", "We couldn't connect to 'https://huggingface.co' to load the files"),
    ("LicenseError", "Cannot connect to license server 27000@flex: error -15"),
)
OWN = (
    ("RuntimeError", "Connection refused"),
    ("ValueError", "HTTP Error 503 is no number"),
    ("KeyError", "'ConnectionRefusedError'"),
    ("urllib.error.HTTPError", "HTTP Error 404: Not Found"),
    ("urllib.error.HTTPError", "HTTP Error 403: Forbidden"),
    ("requests.exceptions.HTTPError", "401 Client Error: Unauthorized for url: http://data:5000/"),
    ("requests.exceptions.InvalidURL", "Failed to parse: http://"),
    ("requests.exceptions.SSLError", "certificate verify failed"),
    ("botocore.exceptions.ClientError", "An error occurred (AccessDenied) when calling the GetObject operation"),
    ("botocore.exceptions.ClientError", "An error occurred (NoSuchKey) when calling the GetObject operation"),
    ("FileNotFoundError", "[Errno 2] No such file or directory: '/data/503'"),
    ("OSError", "[Errno 28] No space left on device"),
    ("OSError", "[Errno 98] Address already in use"),
    ("OSError", "[Errno 99] Cannot assign requested address"),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
    ("BrokenPipeError", "[Errno 32] Broken pipe"),
    ("psycopg2.OperationalError", 'FATAL:  password authentication failed for user "a"'),
    ("sqlite3.OperationalError", "no such table: parts"),
    ("psycopg2.InterfaceError", "cursor already closed"),
    ("TimeoutError", "the loader's queue is empty"),
    ("torch.distributed.DistStoreError", "wait timeout after 300000ms, keys: /worker/3"),
)


@pytest.mark.parametrize(("kind", "message"), AWAY)
def test_a_service_that_does_not_answer_is_known(kind: str, message: str) -> None:
    """Refused, timed out, not found by name, or with a status that asks for later."""
    assert is_of_a_service(RankError(kind, message, "", -1))


@pytest.mark.parametrize(("kind", "message"), OWN)
def test_what_only_sounds_so_is_the_scripts_own(kind: str, message: str) -> None:
    """The negative control: a message that quotes, a wrong address, a refused login, a broken connection of a peer."""
    assert not is_of_a_service(RankError(kind, message, "", -1))


def test_what_an_error_was_raised_from_tells_as_well() -> None:
    """A wrapper hides the network; a bug in the handler of it is a bug."""
    refused = RankError("ConnectionRefusedError", "[Errno 111] Connection refused", "", -1)

    assert is_of_a_service(RankError("RuntimeError", "the data set can't be read", "", -1), [refused])
    assert not is_of_a_service(RankError("NameError", "name 'retry' is not defined", "", -1), [refused])
    assert not is_of_a_service(RankError("RuntimeError", "the data set can't be read", "", -1))


def test_a_licence_server_is_known_by_its_clients_last_line() -> None:
    """Programs that are not Python's say it, and leave with a code."""
    assert says_so("exit code N: Cannot connect to license server system. (-N,N:N)")
    assert not says_so("exit code N: the license has expired")
