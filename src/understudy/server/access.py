"""Route classes, and the checks that a request passes before a control route answers it (docs/live.md)."""

from __future__ import annotations

import enum
import hmac
import ipaddress
from typing import TYPE_CHECKING

from understudy.errors import ConfigError
from understudy.server.api.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.http import Connection, Request

    Network = ipaddress.IPv4Network | ipaddress.IPv6Network
    Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class RouteClass(enum.Enum):
    """The clients that may call a route."""

    PUBLIC = "every client, as with vLLM"
    KEYED = "clients with a key when one is set, as with vLLM"
    CONTROL = "clients with a key when one is set, else loopback and --admin-host"


_KEYED_PREFIXES = ("/v1", "/v2", "/inference", "/cohere")
_PUBLIC_PREFIXES = ("/metrics/", "/adapters/", "/page/")
_PUBLIC = frozenset(
    (
        "/",  # the fleet's page, with its files below /page/; its data are below /fleet/
        *("/health", "/health/ready", "/ping", "/version", "/load", "/metrics", "/kv_event_sources"),
        *("/tokenize", "/detokenize", "/tokenizer_info", "/invocations", "/generative_scoring", "/adapters"),
        *("/pooling", "/classify", "/embed", "/score", "/rerank"),
        *("/scale_elastic_ep", "/is_scaling_elastic_ep"),
        *("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"),
    )
)
_OWN_PREFIXES = ("/admin/", "/fleet/")
_OWN = frozenset(("/query", "/register", "/unregister", "/dump"))


def route_class(path: str) -> RouteClass:
    """Classify a path. A path that is not listed here as vLLM's is a control route."""
    if path.startswith(_KEYED_PREFIXES):
        return RouteClass.KEYED
    if (path.rstrip("/") or "/") in _PUBLIC or path.startswith(_PUBLIC_PREFIXES):
        return RouteClass.PUBLIC
    return RouteClass.CONTROL


def is_own(path: str) -> bool:
    """True for routes that vLLM does not have, whatever their last part."""
    return path.startswith(_OWN_PREFIXES) or path.rstrip("/") in _OWN


def admin_networks(hosts: Sequence[str], keys: Sequence[str]) -> tuple[Network, ...]:
    """Read `--admin-host`. ConfigError names an entry that is no address, or a key next to it."""
    if hosts and keys:
        raise ConfigError("--admin-host: has no effect with --api-key, which control routes need; give one")
    networks: list[Network] = []
    for host in hosts:
        try:
            networks.append(ipaddress.ip_network(host))
        except ValueError as error:
            raise ConfigError(
                f"--admin-host: {error}; give addresses or networks, as 10.0.0.7 or 10.0.0.0/8"
            ) from None
    return tuple(networks)


class Unauthorized(ApiError):
    """The answer to a request without a valid key, in vLLM's words."""

    def __init__(self) -> None:
        super().__init__("Unauthorized", status=401)

    def body(self) -> bytes:
        """Return the answer's JSON."""
        return b'{"error":"Unauthorized"}'


class Access:
    """Checks requests to one port. `host` is the name or address that the port is bound to."""

    def __init__(
        self,
        *,
        keys: Sequence[str] = (),
        admin_hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        host: str = "",
    ) -> None:
        self._keys = tuple(key.encode() for key in keys)
        self._networks = admin_networks(admin_hosts, keys)
        self._origins = frozenset(origins) - {"*"}
        self._host = host.lower()

    def check(self, kind: RouteClass, request: Request, connection: Connection) -> None:
        """Raise ApiError when the client may not call a route of this class."""
        if kind is RouteClass.PUBLIC or request.method == "OPTIONS":
            return
        if self._keys and not self._has_key(request):
            raise Unauthorized
        if kind is RouteClass.CONTROL:
            self._check_control(request, connection)

    def _has_key(self, request: Request) -> bool:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.encode("latin-1", "replace")
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    def _check_control(self, request: Request, connection: Connection) -> None:
        origin, host = request.headers.get("origin"), request.headers.get("host")
        if not self._keys:
            loopback = self._check_peer(request.path, connection.peer)
            # A name that an attacker's DNS points at this machine; other names are fine for remote programs.
            if host is not None and (loopback or origin is not None) and not self._is_known(host):
                raise _forbidden(f"host: {host!r} is not a name of this server; use its address or localhost")
        if origin is not None and origin not in self._origins and origin.partition("://")[2] != host:
            raise _forbidden(
                f"origin: {origin!r} is another server; call control routes from this server's page"
            )
        if request.method == "POST" and is_own(request.path):
            content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if content != "application/json":
                raise ApiError(
                    f"content-type: must be application/json, got {content!r}; use curl --json",
                    status=415,
                    kind="UnsupportedMediaTypeError",
                )

    def _check_peer(self, path: str, peer: str | None) -> bool:
        """True for a loopback client. ApiError for one elsewhere that --admin-host does not allow."""
        if peer == "":  # a Unix socket: the file's permissions decide, and browsers cannot connect
            return False
        address = None if peer is None else _address(peer)
        if address is not None and address.is_loopback:
            return True
        if address is None or not any(address in network for network in self._networks):
            raise _forbidden(
                f"{path}: answers clients on this machine only; start the server with --api-key, "
                f"or allow this client with --admin-host {peer}"
            )
        return False

    def _is_known(self, host: str) -> bool:
        """Addresses cannot be rebound by DNS; `localhost` and the server's own name are known."""
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        name = name.lower().rstrip(".")
        return name in ("localhost", self._host) or name.endswith(".localhost") or _address(name) is not None


def _address(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _forbidden(message: str) -> ApiError:
    return ApiError(message, status=403, kind="PermissionDeniedError")
