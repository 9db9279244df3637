"""Certificates for the secured listener, made at run time by the JDK's keytool: an authority of one's own."""

import secrets
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .binaries import LOCALE, java
from .errors import DevstackError, ToolMissingError

__all__ = ["TlsFiles", "make_certificates"]


@dataclass(frozen=True)
class TlsFiles:
    """Where the generated files are."""

    ca: Path  # PEM: what clients trust
    keystore: Path  # PKCS12: the broker's key and certificate
    password: str  # of the key store


def make_certificates(directory: Path) -> TlsFiles:
    """Make a certificate authority and a certificate for 127.0.0.1 and localhost, signed by it.

    Raises:
        ToolMissingError: the Java at hand has no keytool.
        DevstackError: keytool failed; the text carries what it said.
    """
    directory.mkdir(parents=True, exist_ok=True)
    password = secrets.token_urlsafe(18)
    files = TlsFiles(directory / "ca.pem", directory / "broker.p12", password)
    ca_store = directory / "ca.p12"
    for old in (files.ca, files.keystore, ca_store):
        old.unlink(missing_ok=True)

    def keytool(*arguments: str, store: Path) -> bytes:
        # resolve(): the system's `java` is often a link, and keytool lives beside its target
        tool = Path(java()).resolve().parent / "keytool"
        if not tool.exists():
            raise ToolMissingError(f"{tool} is missing: install a JDK or JRE that has keytool")
        where = ("-keystore", str(store), "-storetype", "PKCS12", "-storepass:env", "STOREPASS")
        command = [str(tool), "-J-XX:TieredStopAtLevel=1", *arguments, *where]
        env = {"STOREPASS": password, "LC_ALL": LOCALE}
        done = subprocess.run(command, input=request, capture_output=True, env=env, check=False, timeout=60)
        if done.returncode != 0:
            raise DevstackError(f"keytool failed: {(done.stdout + done.stderr).decode(errors='replace')}")
        return done.stdout

    key = ("-keyalg", "EC", "-groupname", "secp256r1", "-validity", "3650")
    # An authority that does not say what its key is for is refused by clients on Python 3.13.
    authority_key = (*key, "-dname", "CN=sidings devstack", "-ext", "bc:c", "-ext", "ku:c=keyCertSign,cRLSign")
    names = "san=ip:127.0.0.1,dns:localhost"
    request = b""
    keytool("-genkeypair", "-alias", "ca", *authority_key, store=ca_store)
    authority = keytool("-exportcert", "-alias", "ca", "-rfc", store=ca_store)
    keytool("-genkeypair", "-alias", "broker", "-dname", "CN=localhost", *key, store=files.keystore)
    request = keytool("-certreq", "-alias", "broker", store=files.keystore)
    signed = keytool("-gencert", "-alias", "ca", "-rfc", "-ext", names, "-validity", "3650", store=ca_store)
    request = authority
    keytool("-importcert", "-noprompt", "-alias", "ca", store=files.keystore)
    request = signed
    keytool("-importcert", "-noprompt", "-alias", "broker", store=files.keystore)
    files.ca.write_bytes(authority)
    return files
