"""How to reach Kafka, and how the consumer behaves towards it. Durations are seconds."""

import asyncio
import re
import ssl
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal

from aiokafka.abc import AbstractTokenProvider
from aiokafka.errors import KafkaConnectionError
from pydantic import ConfigDict, Field, SecretStr

from ..errors import ConfigurationError
from ..settings import Settings
from .tls import context_of

__all__ = ["KafkaSettings"]

_MOST_BYTES, _MOST_SECONDS = 2**31 - 1, 1_000_000  # that Kafka's protocol can say: the times in milliseconds
# IPv6 in brackets; Kafka's own port is the default.
_ADDRESS = re.compile(r"([^\s:\[\]]+|\[[^\s\[\]]+\])(?::(\d{1,5}))?")

Mechanism = Literal["PLAIN", "GSSAPI", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]


class KafkaSettings(Settings):
    """How to reach Kafka, and how the consumer behaves towards it::

        KafkaSettings(bootstrap="kafka-1:9092,kafka-2:9092", security_protocol="SSL", cafile="/etc/ssl/kafka.pem")

    TLS and SASL go to aiokafka as they are.

    Args:
        bootstrap: ``host:port``, several separated by commas.
        group: The consumer group. Default: the service's name.
        client_id: Of all clients: shown in the brokers' logs, and what quotas go by. Default: aiokafka's.
        ssl_context: One of your own, in place of the files. Otherwise it is made from them.
        cafile: Default: the system's authorities. Files that are replaced are read again for the next connection.
        certfile: With `keyfile` and `keyfile_password`, for a client's certificate.
        sasl_mechanism: PLAIN and SCRAM take `sasl_username` and `sasl_password`, OAUTHBEARER
            `sasl_oauth_token_provider`, GSSAPI the kerberos names, and ``pip install 'aiokafka[gssapi]'``.
        sasl_oauth_token_provider: While it raises, or takes longer than `request_seconds`, Kafka is away.
        isolation_level: ``"read_committed"`` leaves out messages of aborted transactions, as directories always do.
        session_seconds: Without a heartbeat for so long, Kafka gives the partitions to others. It is a part of the time
            that a takeover takes after a kill.
        rebalance_seconds: How long a rebalance waits for a slow member.
        request_seconds: How long any request to Kafka may take; longer than `rebalance_seconds`.
        fetch_seconds: How long Kafka may wait for new messages. A partition that resumes may wait as long.
        fetch_bytes: Most bytes of one fetch. Fewer are fetched after one that was not answered in `request_seconds`.
        partition_fetch_bytes: Most bytes of one partition in a fetch; for directories at least 4 MiB.
        metadata_seconds: How often to look for new partitions and topics.
        max_records: Most messages in one transaction.
        batch_seconds: After so long the transaction is committed, and what is left of the messages goes into the next
            one. At most 30.
        dedup_days: How long the ids of messages are remembered, where a consumer says ``dedup=``.
        partitioners: How a topic's producers choose the partition of a key, where it is not as Java does
            (``"murmur2"``): ``{"positions": "crc32"}``, as librdkafka does. Relay, `service.producer` and dead letters
            choose as they do. Alike in all instances: the last to connect decides which origin a key has, for all.

    Raises:
        ConfigurationError: A value cannot work, or some do not go together; the message names the fields.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    bootstrap: str = Field(min_length=1)
    group: str | None = Field(default=None, min_length=1)
    client_id: str | None = None
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    ssl_context: ssl.SSLContext | None = None
    cafile: Path | None = None
    certfile: Path | None = None
    keyfile: Path | None = None
    keyfile_password: SecretStr | None = None
    sasl_mechanism: Mechanism = "PLAIN"
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    sasl_oauth_token_provider: AbstractTokenProvider | None = None
    sasl_kerberos_service_name: str = "kafka"
    sasl_kerberos_domain_name: str | None = None
    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"
    session_seconds: float = Field(default=10.0, ge=1, le=_MOST_SECONDS)
    rebalance_seconds: float = Field(default=20.0, ge=1, le=_MOST_SECONDS)
    request_seconds: float = Field(default=40.0, gt=0)
    fetch_seconds: float = Field(default=0.25, gt=0, le=_MOST_SECONDS)
    fetch_bytes: int = Field(default=50 * 1024 * 1024, ge=1, le=_MOST_BYTES)
    partition_fetch_bytes: int = Field(default=1024 * 1024, ge=1, le=_MOST_BYTES)
    metadata_seconds: float = Field(default=60.0, gt=0)
    max_records: int = Field(default=1_000, ge=1, le=100_000)
    batch_seconds: float = Field(default=0.5, gt=0, le=30)  # and 30 for a handler: then `/health` calls it stuck
    dedup_days: int = Field(default=7, ge=1, le=1_000)
    partitioners: Mapping[str, Literal["murmur2", "crc32"]] = {}

    def check(self) -> None:
        """See whether addresses, credentials, files and times go together.

        Raises:
            ConfigurationError: They do not.
        """
        for address in self.bootstrap.replace(" ", "").split(","):
            found = _ADDRESS.fullmatch(address)
            if found is None or not 1 <= int(found[2] or 9092) <= 65_535:
                raise ConfigurationError(
                    f"bootstrap={self.bootstrap!r}: give host:port, several separated by commas, with ports from 1 to "
                    "65535"
                )
        self._check_security()
        if self.request_seconds <= self.rebalance_seconds:
            raise ConfigurationError(
                f"request_seconds={self.request_seconds} must be longer than rebalance_seconds="
                f"{self.rebalance_seconds}: the request to join waits for the slowest member"
            )
        for name in ("cafile", "certfile", "keyfile"):
            path: Path | None = getattr(self, name)
            if path is not None and (why := _why_no_file(path)):
                raise ConfigurationError(f"{name}={why}")

    def _check_security(self) -> None:
        """Refuse what would not be used: else whoever forgets `security_protocol` connects in plain text."""
        sasl = self.security_protocol.startswith("SASL")
        by_password = self.sasl_mechanism.startswith(("PLAIN", "SCRAM"))
        passwords, providers = self._given("sasl_username", "sasl_password"), self._given("sasl_oauth_token_provider")
        mechanism = [] if self.sasl_mechanism == "PLAIN" else ["sasl_mechanism"]
        files = self._given("cafile", "certfile", "keyfile", "keyfile_password")
        for given, used, remedy in (
            ([*passwords, *providers, *mechanism], sasl, "'SASL_SSL' or 'SASL_PLAINTEXT'"),
            ([*files, *self._given("ssl_context")], self.tls, "'SSL' or 'SASL_SSL'"),
        ):
            if given and not used:
                raise ConfigurationError(
                    f"{given[0]}= is given, but security_protocol={self.security_protocol!r} does not use it: give "
                    f"security_protocol={remedy}, or leave it out"
                )
        if providers and self.sasl_mechanism != "OAUTHBEARER":
            raise ConfigurationError(
                f"sasl_mechanism={self.sasl_mechanism!r} does not use sasl_oauth_token_provider=: give "
                "sasl_mechanism='OAUTHBEARER', or leave it out"
            )
        if passwords and not by_password:
            raise ConfigurationError(
                f"sasl_mechanism={self.sasl_mechanism!r} does not use {passwords[0]}=: give sasl_mechanism='PLAIN' or "
                "one of SCRAM's, or leave it out"
            )
        if sasl and by_password and len(passwords) < 2:
            raise ConfigurationError(
                f"security_protocol={self.security_protocol!r} with sasl_mechanism={self.sasl_mechanism!r} needs "
                "sasl_username= and sasl_password="
            )
        if self.sasl_mechanism == "OAUTHBEARER" and not providers:
            raise ConfigurationError(
                "sasl_mechanism='OAUTHBEARER' needs sasl_oauth_token_provider=, which only code can give: "
                "kafka=KafkaSettings(..., sasl_oauth_token_provider=...)"
            )
        if self.sasl_mechanism == "GSSAPI" and find_spec("gssapi") is None:
            raise ConfigurationError("sasl_mechanism='GSSAPI' needs the gssapi library: pip install 'aiokafka[gssapi]'")
        if files and self.ssl_context is not None:
            raise ConfigurationError(
                f"ssl_context= is used as it is, without {files[0]}=: load that into it, or leave out one of the two"
            )
        if (keys := self._given("keyfile", "keyfile_password")) and self.certfile is None:
            raise ConfigurationError(
                f"{keys[0]}= is given without certfile=: give the certificate as well, or leave it out"
            )

    def _given(self, *fields: str) -> list[str]:
        return [field for field in fields if getattr(self, field) is not None]

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.security_protocol in ("SSL", "SASL_SSL")

    def client_options(self) -> dict[str, Any]:
        """The keyword arguments that every client of aiokafka takes: address, name, TLS, SASL, timeouts."""
        return {
            "bootstrap_servers": self.bootstrap.replace(" ", "").split(","),
            **({} if self.client_id is None else {"client_id": self.client_id}),
            "security_protocol": self.security_protocol,
            "ssl_context": self._tls_context(),
            "sasl_mechanism": self.sasl_mechanism,
            "sasl_plain_username": self.sasl_username,
            "sasl_plain_password": self.sasl_password.get_secret_value() if self.sasl_password else None,
            "sasl_oauth_token_provider": self.sasl_oauth_token_provider
            and _Tokens(self.sasl_oauth_token_provider, self.request_seconds),
            "sasl_kerberos_service_name": self.sasl_kerberos_service_name,
            "sasl_kerberos_domain_name": self.sasl_kerberos_domain_name,
            "request_timeout_ms": _ms(self.request_seconds),
            "metadata_max_age_ms": _ms(self.metadata_seconds),
        }

    def consumer_options(self) -> dict[str, Any]:
        """`client_options`, and what a consumer of a group takes beside them."""
        return self.client_options() | {
            "session_timeout_ms": _ms(self.session_seconds),
            "heartbeat_interval_ms": _ms(min(1.0, self.session_seconds / 3)),
            "rebalance_timeout_ms": _ms(self.rebalance_seconds),
            "isolation_level": self.isolation_level,
            "fetch_max_wait_ms": _ms(self.fetch_seconds),
            "fetch_max_bytes": self.fetch_bytes,
            "max_partition_fetch_bytes": self.partition_fetch_bytes,
        }

    def _tls_context(self) -> ssl.SSLContext | None:
        if not self.tls or self.ssl_context is not None:
            return self.ssl_context
        password = self.keyfile_password.get_secret_value() if self.keyfile_password else None
        try:
            return context_of(self.cafile, self.certfile, self.keyfile, password)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigurationError(f"the TLS files cannot be used: {error}") from error


class _Tokens(AbstractTokenProvider):
    """The author's, which may raise anything while there is no token: aiokafka expects errors of its own, over others
    it loses tasks, and the service would end. Or take for ever: aiokafka waits, and makes no other connection."""

    def __init__(self, provider: AbstractTokenProvider, seconds: float) -> None:
        self._provider: Any = provider  # the abstract one is annotated to return None
        self._seconds = seconds

    async def token(self) -> Any:
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                return await self._provider.token()
        except Exception as error:
            why = f" within {self._seconds} s" if limit.expired() else f": {error!r}"
            raise KafkaConnectionError(f"sasl_oauth_token_provider gave no token{why}") from error

    def extensions(self) -> Any:
        try:
            return self._provider.extensions()
        except Exception as error:
            raise KafkaConnectionError(f"sasl_oauth_token_provider gave no extensions: {error!r}") from error


def _why_no_file(path: Path) -> str | None:
    text = str(path)
    if "-----BEGIN" in text or "\n" in text or "\r" in text:  # which no error may show
        return " holds a certificate or key itself: give the path of a file with it"
    try:
        if S_ISREG(path.stat().st_mode):
            return None
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # it may be too long for a name, and no name; `is_file` of Python 3.14 does not tell
        return f" cannot be looked at as a file: {error.strerror}"
    return f"{text!r} is no file"


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
