"""Signatures of unlearning records and saved states, which prove their author and that they are unchanged."""

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

_ALGORITHM = "Ed25519"


class SigningError(ValueError):
    """Error if a record or state can't be signed, or if its signature is not valid."""


def signature_of(values: Mapping[str, Any], private_key: Any) -> dict[str, str]:
    """Sign values as UTF-8 JSON with sorted keys, no spaces; return a dict of algorithm, public key and signature."""
    key = as_key(private_key, "private")
    _, serialization, _ = _import_parts()
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    signature = base64.b64encode(key.sign(_canonical_json(values))).decode()
    return {"algorithm": _ALGORITHM, "public_key": base64.b64encode(raw).decode(), "signature": signature}


def verifier_of(public_key: Any) -> Callable[[Mapping[str, Any], Any], None]:
    """Return a function (values, signature) that raises SigningError unless ``public_key`` verifies the signature."""
    key = as_key(public_key, "public")
    _, _, invalid_signature = _import_parts()

    def check(values: Mapping[str, Any], signature: Any) -> None:
        if signature is None:
            raise SigningError("it is not signed: sign it where it is written, or ask for no signature")
        try:
            key.verify(base64.b64decode(signature["signature"], validate=True), _canonical_json(values))
        except (ValueError, TypeError, KeyError) as error:
            raise SigningError(f"its signature is none ({type(error).__name__}: {error})") from error
        except invalid_signature:
            raise SigningError(
                "the signature does not hold: changed after signing, or another key signed it; take it from its source"
            ) from None

    return check


def _canonical_json(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")


def as_key(given: Any, side: Literal["private", "public"]) -> Any:
    """Convert 32 raw bytes or PEM bytes to a key object (key objects stay); raise SigningError for another value."""
    ed25519, serialization, _ = _import_parts()
    kind = getattr(ed25519, f"Ed25519{side.capitalize()}Key")
    if isinstance(given, kind):
        return given
    if isinstance(given, bytes):
        try:
            if len(given) == 32:
                return getattr(kind, f"from_{side}_bytes")(given)
            if side == "private":
                loaded = serialization.load_pem_private_key(given, password=None)
            else:
                loaded = serialization.load_pem_public_key(given)
        except (ValueError, TypeError) as error:
            raise SigningError(
                f"the {side} key can't be read: give the 32 raw bytes of an {kind.__name__}, or its unencrypted PEM"
            ) from error
        if isinstance(loaded, kind):
            return loaded
    raise SigningError(
        f"the {side} key must be an {kind.__name__}, its 32 bytes, or its unencrypted PEM; got {type(given).__name__}"
    )


def _import_parts() -> tuple[Any, Any, type[Exception]]:
    """Import and return the required parts of the optional package ``cryptography``; SigningError if it is missing."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise SigningError("signing needs the package cryptography: pip install 'avalanche-amnesia[sign]'") from error
    return ed25519, serialization, InvalidSignature
