"""EndpointSlices of a Kubernetes service, read from the API server with the pod's own account."""

from __future__ import annotations

import asyncio
import http.client
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from understudy.errors import ConfigError
from understudy.http import address_of

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 5.0


class SlicesError(Exception):
    """An API server that does not answer, or refuses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiServer:
    """Address and credentials of the API server; `token` is a file, because it is renewed."""

    host: str
    port: int
    token: Path | None
    authority: Path | None
    """Certificate of its authority; None: plain HTTP, for tests."""

    @classmethod
    def of_pod(cls, account: Path = _ACCOUNT) -> ApiServer:
        """Return what a pod is given. ConfigError outside of one."""
        host, port = (
            os.environ.get("KUBERNETES_SERVICE_HOST"),
            os.environ.get("KUBERNETES_SERVICE_PORT", "443"),
        )
        if host is None or not (account / "token").is_file():
            raise ConfigError(
                "--discover endpointslices: this is not a pod with a service account; set "
                "automountServiceAccountToken, or use srv:NAME"
            )
        return cls(host=host, port=int(port), token=account / "token", authority=account / "ca.crt")

    def read(self, path: str) -> Any:
        """Return the JSON of a path. SlicesError without it."""
        connection: http.client.HTTPConnection
        if self.authority is None:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=_TIMEOUT_S)
        else:
            context = ssl.create_default_context(cafile=str(self.authority))
            connection = http.client.HTTPSConnection(
                self.host, self.port, timeout=_TIMEOUT_S, context=context
            )
        headers = {"accept": "application/json"}
        try:
            if self.token is not None:
                headers["authorization"] = f"Bearer {self.token.read_text().strip()}"
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise SlicesError(f"the API server cannot be asked: {error}") from error
        finally:
            connection.close()
        if answer.status != 200:
            hint = "; the account needs get and list of endpointslices" if answer.status == 403 else ""
            raise SlicesError(f"the API server answers {answer.status}{hint}")
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise SlicesError(f"the API server's answer is not JSON: {error}") from error


async def read_slices(server: ApiServer, namespace: str, service: str, port: str | None) -> set[str]:
    """Return the URLs of a service's ready endpoints; `port` is its name or number, None the only or first one."""
    selector = quote(f"kubernetes.io/service-name={service}", safe="")
    path = f"/apis/discovery.k8s.io/v1/namespaces/{quote(namespace)}/endpointslices?labelSelector={selector}"
    content = await asyncio.to_thread(server.read, path)
    try:
        return {url for one in content["items"] for url in list_urls(one, port)}
    except (KeyError, TypeError, AttributeError) as error:
        raise SlicesError(f"the API server's answer is no list of EndpointSlices: {error!r}") from error


def list_urls(endpoint_slice: dict[str, Any], port: str | None) -> list[str]:
    """Return the URLs of the ready endpoints of one slice; endpoints that terminate are not ready."""
    ports = endpoint_slice.get("ports") or []
    chosen = next(
        (one["port"] for one in ports if port is None or port in (one.get("name"), str(one.get("port")))),
        None,
    )
    if chosen is None:
        return []
    return [
        f"http://{address_of(endpoint['addresses'][0], chosen)}"
        for endpoint in endpoint_slice.get("endpoints") or []
        if (endpoint.get("conditions") or {}).get("ready") is not False
    ]
