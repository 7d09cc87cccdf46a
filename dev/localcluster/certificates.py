"""The cluster's certificate authority, serving certificates, service-account key and bearer tokens."""

import secrets
from collections.abc import Iterable
from pathlib import Path

from localcluster.cache import write_atomically
from localcluster.constants import (
    API_SERVICE_ADDRESS,
    CLUSTER_DOMAIN,
    HOST_ADDRESS,
    LOOPBACK,
    NODE_NAMES,
    node_address,
)
from localcluster.paths import Paths
from localcluster.progress import run

DAYS = "3650"
USERS = {
    "admin": ("rolloutfleet-admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "proxy": ("system:kube-proxy", ""),
    "coredns": ("system:coredns", ""),
    "kwok": ("system:kwok", ""),
    **{f"kubelet-{name}": (f"system:node:{name}", "system:nodes") for name in NODE_NAMES},
}
"""Short name of a token -> (user, group) that the API server takes its bearer for."""


def render_token_file(tokens: dict[str, str]) -> str:
    """The API server's static token file, one user a line."""
    lines = []
    for short, token in sorted(tokens.items()):
        user, group = USERS[short]
        lines.append(f"{token},{user},{short}" + (f',"{group}"' if group else ""))
    return "\n".join(lines) + "\n"


def read_tokens(paths: Paths) -> dict[str, str]:
    """Short name -> bearer token, as `ensure_pki` made them."""
    tokens = {}
    for line in (paths.pki / "tokens.csv").read_text().splitlines():
        token, _, short = line.split(",")[:3]
        tokens[short] = token
    return tokens


def ensure_pki(paths: Paths) -> None:
    """Makes what is missing in the pki folder: keys are readable by this user alone."""
    pki = paths.pki
    pki.mkdir(parents=True, exist_ok=True)
    pki.chmod(0o700)
    if not (pki / "tokens.csv").exists():
        text = render_token_file({short: secrets.token_urlsafe(24) for short in USERS})
        write_atomically(pki / "tokens.csv", text, 0o600)
    if not (pki / "ca.crt").exists():
        _authority(paths)
    if not (pki / "sa.pub").exists():
        run(["openssl", "genrsa", "-out", str(pki / "sa.key"), "2048"], state=paths.state)
        run(["openssl", "rsa", "-in", str(pki / "sa.key"), "-pubout", "-out", str(pki / "sa.pub")], state=paths.state)
    service_names = [
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        f"kubernetes.default.svc.{CLUSTER_DOMAIN}",
    ]
    _certificate(
        paths,
        "apiserver",
        "/CN=kube-apiserver",
        ["localhost", *service_names],
        [LOOPBACK, HOST_ADDRESS, API_SERVICE_ADDRESS],
    )
    _certificate(paths, "kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client", [], [])
    for index, name in enumerate(NODE_NAMES):
        _certificate(paths, name, f"/O=system:nodes/CN=system:node:{name}", [name], [node_address(index)])


def _key(paths: Paths, file: Path) -> None:
    run(
        ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", str(file)],
        state=paths.state,
    )


def _authority(paths: Paths) -> None:
    key, pending = paths.pki / "ca.key", paths.pki / ".ca.pending"
    _key(paths, key)
    argv = ["openssl", "req", "-x509", "-new", "-key", str(key), "-days", DAYS, "-subj", "/CN=rolloutfleet-local-ca"]
    extensions = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    # openssl's own default section adds the extensions of a CA once more; an empty configuration keeps them single.
    run([*argv, *extensions, "-config", str(_empty_config(paths)), "-out", str(pending)], state=paths.state)
    for stale in paths.pki.glob("*.crt"):
        stale.unlink()
    pending.rename(paths.pki / "ca.crt")


def _empty_config(paths: Paths) -> Path:
    file = paths.pki / "openssl.cnf"
    file.write_text("[req]\ndistinguished_name = dn\n[dn]\n")
    return file


def _certificate(paths: Paths, name: str, subject: str, dns: Iterable[str], addresses: Iterable[str]) -> None:
    certificate = paths.pki / f"{name}.crt"
    if certificate.exists():
        return
    key, request, pending, extensions = (paths.pki / f".{name}.{end}" for end in ("key", "csr", "pending", "ext"))
    _key(paths, key)
    config = ["-config", str(_empty_config(paths))]
    run(
        ["openssl", "req", "-new", "-key", str(key), "-subj", subject, *config, "-out", str(request)], state=paths.state
    )
    names = [f"DNS:{entry}" for entry in dns] + [f"IP:{entry}" for entry in addresses]
    lines = ["keyUsage=critical,digitalSignature", "extendedKeyUsage=serverAuth,clientAuth"]
    extensions.write_text("\n".join([*lines, *([f"subjectAltName={','.join(names)}"] if names else [])]) + "\n")
    authority = ["-CA", str(paths.pki / "ca.crt"), "-CAkey", str(paths.pki / "ca.key"), "-CAcreateserial"]
    argv = ["openssl", "x509", "-req", "-in", str(request), *authority, "-days", DAYS, "-extfile", str(extensions)]
    run([*argv, "-out", str(pending)], state=paths.state)
    key.rename(paths.pki / f"{name}.key")
    request.unlink()
    extensions.unlink()
    pending.rename(certificate)
