# SPDX-License-Identifier: Apache-2.0
"""A Grafana server, through grafana-client: what we ask of it, and one sentence for each way it can refuse.

grafana-client lets errors of the HTTP library below it pass, and takes any text for an answer; here both become
sentences. API: https://grafana.com/docs/grafana/latest/developers/http_api/.
"""

from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlsplit

from megascale_ops.errors import MegascaleError, UsageError
from megascale_ops.grafana.shape import Model

# 20 s: a save takes 50 ms, and some seconds while Grafana migrates its database.
ANSWER_S = 20.0
_PAGE = 1000  # folders at once, the API's own default


class NotAllowedError(MegascaleError):
    """Grafana knows us and refuses (403)."""


class Server:
    """One Grafana server.

    Args:
        url: its address, with a path when it is served below one.
        credential: a service account's token, a pair of user and password, or None.
        ca_file: certificates to trust besides the system's; "" for none.
        timeout_s: how long an answer may take.

    Raises:
        UsageError: no such address can be.
    """

    def __init__(
        self, url: str, credential: str | tuple[str, str] | None, ca_file: str = "", timeout_s: float = ANSWER_S
    ) -> None:
        wrong = UsageError(f"{url!r} is no address of a Grafana server: it looks like http://HOST:3000")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise wrong from error
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
            raise wrong
        if parts.username or parts.password:
            raise UsageError("the address carries a password that others can see: give --user and --password-file")
        from grafana_client.api import GrafanaApi

        prefix = parts.path.strip("/")
        self.url = f"{parts.scheme}://{parts.netloc}{'/' if prefix else ''}{prefix}"
        self._timeout_s = timeout_s
        self._api: Any = GrafanaApi(  # its calls are untyped
            credential,
            protocol=parts.scheme,
            host=f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname,
            port=port,
            url_path_prefix=f"{prefix}/" if prefix else "",
            verify=ca_file or True,
            timeout=timeout_s,
        )

    def close(self) -> None:
        """Let go of the connections."""
        self._api.client.s.close()

    def version(self) -> str:
        """Return the server's version, "" when it hides it.

        Raises:
            MegascaleError: no answer, or the server is no Grafana.
        """
        answer = self._ask("say its version", lambda: self._api.client.GET("/health"))
        if not isinstance(answer, dict) or "database" not in answer:
            raise MegascaleError(f"what answers at {self.url} is no Grafana")
        if answer["database"] != "ok":
            raise MegascaleError(f"Grafana at {self.url} is not well: its database is {answer['database']!r}")
        return str(answer.get("version", ""))

    def datasources(self) -> list[Model]:
        """Return all data sources. Raises ``NotAllowedError`` without the right to see them."""
        return self._list("list data sources", self._api.datasource.list_datasources)

    def create_datasource(self, model: Model) -> None:
        """Create a data source."""
        self._ask(f"create the data source {model['name']!r}", lambda: self._api.datasource.create_datasource(model))

    def update_datasource(self, model: Model) -> None:
        """Change a data source, found by its uid."""
        self._ask(
            f"change the data source {model['name']!r}",
            lambda: self._api.datasource.update_datasource_by_uid(quote(model["uid"], safe=""), model),
        )

    def folders(self) -> list[Model]:
        """Return the folders at the top."""
        found: list[Model] = []
        while True:
            page = 1 + len(found) // _PAGE
            path = f"/folders?limit={_PAGE}&page={page}"
            more = self._list("list folders", lambda path=path: self._api.client.GET(path))  # type: ignore[misc]  # lambda
            found += more
            if len(more) < _PAGE:
                return found

    def create_folder(self, title: str, uid: str) -> None:
        """Create a folder at the top."""
        self._ask(f"create the folder {title!r}", lambda: self._api.folder.create_folder(title, uid))

    def dashboard(self, uid: str) -> Model | None:
        """Return a dashboard with its ``meta``, None when there is none."""
        at = quote(uid, safe="")
        answer = self._ask(
            f"read the dashboard {uid!r}", lambda: self._api.dashboard.get_dashboard(at), missing_ok=True
        )
        if answer is not None and not (isinstance(answer, dict) and isinstance(answer.get("dashboard"), dict)):
            raise MegascaleError(f"what answers at {self.url} is no Grafana")
        return answer

    def save(self, body: Model) -> None:
        """Create or change a dashboard."""
        self._ask(
            f"save the dashboard {body['dashboard'].get('title')!r}",
            lambda: self._api.dashboard.update_dashboard(body),
        )

    def _list(self, what: str, call: Callable[[], Any]) -> list[Model]:
        answer = self._ask(what, call)
        if not isinstance(answer, list):
            raise MegascaleError(f"what answers at {self.url} is no Grafana")
        return [one for one in answer if isinstance(one, dict)]

    def _ask(self, what: str, call: Callable[[], Any], *, missing_ok: bool = False) -> Any:  # noqa: ANN401  any JSON
        """Call Grafana; with ``missing_ok`` the answer to "not found" is None.

        Raises:
            NotAllowedError: 403.
            MegascaleError: every other no.
        """
        from grafana_client.client import GrafanaException, GrafanaTimeoutError
        from niquests.exceptions import ConnectionError as NoConnectionError
        from niquests.exceptions import RequestException, SSLError

        try:
            return call()
        except GrafanaTimeoutError as error:
            raise MegascaleError(
                f"Grafana at {self.url} did not answer within {self._timeout_s:g} s when asked to {what}"
            ) from error
        except GrafanaException as error:
            if error.status_code == 404 and missing_ok:
                return None
            raise self._refusal(what, int(error.status_code), error.response, str(error)) from error
        except SSLError as error:
            cause = _cause(error)
            remedy = (
                "give --ca-file with the certificate's authority"
                if "certificate" in cause.lower()
                else "is it http:// instead?"
            )
            raise MegascaleError(f"no TLS connection to {self.url} ({cause}): {remedy}") from error
        except NoConnectionError as error:
            raise MegascaleError(f"no Grafana answers at {self.url}: {_cause(error)}") from error
        except (RequestException, OSError, RecursionError) as error:
            raise MegascaleError(f"what answers at {self.url} is no Grafana, or not well: {_cause(error)}") from error

    def _refusal(self, what: str, status: int, response: object, text: str) -> MegascaleError:
        answer = response if isinstance(response, dict) else {}
        said = str(answer.get("message") or text)[:300]
        where = f"Grafana at {self.url}"
        if status == 403:
            return NotAllowedError(
                f"{where} does not let us {what} (403): {said}. Dashboards need a service account with "
                "the role Editor, data sources one with the role Admin"
            )
        if status == 401:
            text = f"{where} refuses the token or password (401): {said}"
        elif status == 412 and answer.get("status") == "version-mismatch":
            text = f"somebody else saved it while we were asked to {what} (412): look at their change, then push again"
        elif status == 412:
            text = f"{where} won't {what} (412, {answer.get('status', '')}): {said}"
        elif status == 400 and "provisioned" in said:
            text = f"{where} won't {what}: it is provisioned from files; export new files into its folder"
        elif status == 404:
            text = f"there is no Grafana at {self.url} (404 when asked to {what}): is a path missing?"
        else:
            text = f"{where} can't {what} (status {status}): {said}"
        return MegascaleError(text)


def _cause(error: BaseException) -> str:
    """Return the innermost reason: the outer ones name connection pools."""
    seen: BaseException = error
    while True:
        inner = getattr(seen, "reason", None) or (seen.args[0] if seen.args else None)
        if not isinstance(inner, BaseException) or inner is seen:
            break
        seen = inner
    text = str(seen)
    return text.rpartition(">: ")[2] if ">: " in text else text
