"""Signatures of records: who holds the record knows who wrote it, and that nobody has changed it since."""

import base64
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

_ALGORITHM = "Ed25519"


class SigningError(ValueError):
    """A record can't be signed, or its signature does not hold."""


def signed(record: Mapping[str, Any], private_key: Any) -> str:
    """A record with its public key and the signature of its JSON, with sorted keys and no spaces, in UTF-8."""
    key = _key(private_key, "private")
    serialization = _cryptography().serialization
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    document = {
        "record": record,
        "algorithm": _ALGORITHM,
        "public_key": base64.b64encode(raw).decode(),
        "signature": base64.b64encode(key.sign(_canonical(record))).decode(),
    }
    return json.dumps(document, indent=2) + "\n"


def checked(document: str, public_key: Any) -> dict[str, Any]:
    """The record inside a signed document, as plain values, if its signature is that of a key."""
    key = _key(public_key, "public")
    try:
        data = json.loads(document)
        record, signature = data["record"], base64.b64decode(data["signature"], validate=True)
    except (ValueError, TypeError, KeyError) as error:
        raise SigningError(
            f"this is no signed record ({type(error).__name__}: {error}); give what UnlearningRecord.sign returned"
        ) from error
    try:
        key.verify(signature, _canonical(record))
    except _cryptography().InvalidSignature:
        raise SigningError(
            "the signature does not hold: the record was changed after signing, or another key signed it"
        ) from None
    return dict(record)


def _canonical(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _key(given: Any, side: str) -> Any:
    library = _cryptography()
    kind = getattr(library.ed25519, f"Ed25519{side.capitalize()}Key")
    if isinstance(given, kind):
        return given
    if isinstance(given, bytes):
        try:
            if len(given) == 32:
                return getattr(kind, f"from_{side}_bytes")(given)
            if side == "private":
                loaded = library.serialization.load_pem_private_key(given, password=None)
            else:
                loaded = library.serialization.load_pem_public_key(given)
        except (ValueError, TypeError) as error:
            raise SigningError(f"the {side} key can't be read: {error}") from error
        if isinstance(loaded, kind):
            return loaded
    raise SigningError(
        f"{side}_key must be an {kind.__name__}, its 32 raw bytes, or its unencrypted PEM as bytes; "
        f"got {type(given).__name__}"
    )


class _Cryptography(NamedTuple):
    """The parts of the optional package that are used here."""

    ed25519: Any
    serialization: Any
    InvalidSignature: type[Exception]


def _cryptography() -> _Cryptography:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise SigningError("signing needs the package cryptography: pip install 'avalanche-amnesia[sign]'") from error
    return _Cryptography(ed25519, serialization, InvalidSignature)
